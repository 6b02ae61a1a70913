"""What a driver takes from a job's folder, and keeps in it."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_backend.driver.job import BadJobFolder, keep_model_files, open_job
from service.spec.layout import Layout
from tests.megatron_backend.driver import tiny_job


def test_a_job_is_read(tmp_path: Path) -> None:
    folder = tiny_job.write_job(tmp_path / "job", parallel={"tp": 2, "dp": 3})
    job = open_job(folder, 2)
    assert job.layout == Layout(tp=2, dp=3)
    assert job.attempt_folder == folder / "attempts" / "2"
    assert not job.gpu


def test_every_dimension_of_a_jobs_layout_reaches_its_ranks(tmp_path: Path) -> None:
    parallel = {"tp": 2, "pp": 2, "vpp": 3, "cp": 2, "ep": 4, "dp": 2, "sequence_parallel": True}
    job = open_job(tiny_job.write_job(tmp_path / "job", parallel=parallel), 1)
    assert job.layout == Layout(**parallel)
    uneven = tiny_job.write_job(tmp_path / "uneven", parallel={"pp": 2, "pipeline_layers": [1, 2]})
    assert open_job(uneven, 1).layout == Layout(pp=2, pipeline_layers=(1, 2))


def test_no_context(tmp_path: Path) -> None:
    with pytest.raises(BadJobFolder, match=r"context\.json is not there"):
        open_job(tmp_path, 1)


def test_a_context_with_a_wrong_field(tmp_path: Path) -> None:
    folder = tiny_job.write_job(tmp_path / "job")
    document = json.loads((folder / "context.json").read_text())
    document["spec"]["training"]["stesp"] = 3
    (folder / "context.json").write_text(json.dumps(document))
    with pytest.raises(BadJobFolder, match=r"spec\.training\.stesp"):
        open_job(folder, 1)


def test_tokenizer_and_config_outlive_their_source(tmp_path: Path) -> None:
    folder = tiny_job.write_job(tmp_path / "job")
    (folder / "tokenizer" / "model.safetensors").write_bytes(b"weights are not copied")
    first = keep_model_files(open_job(folder, 1))
    shutil.rmtree(folder / "tokenizer")  # it was in a checkpoint that its job has deleted
    second = keep_model_files(open_job(folder, 2))
    assert first.context.model.tokenizer == second.context.model.tokenizer == str(folder / "model")
    assert sorted(path.name for path in (folder / "model").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "model" / "config.json").read_text()) == first.context.model.config


def test_a_tokenizer_that_is_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tiny_job.write_job(tmp_path / "job")
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        keep_model_files(open_job(folder, 1))
    assert not (folder / "model").exists()
