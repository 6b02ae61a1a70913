import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from service.cli.prepare import prepare
from service.spec import JobContext
from tests.service.model_folders import write_model

app = typer.Typer()
app.command()(prepare)


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    rows.write_text(json.dumps({"messages": chat}) + "\n")
    return {
        "name": "alone",
        "model": {"path": str(write_model(tmp_path / "model"))},
        "algorithm": {"type": "sft"},
        "data": {"train": str(rows)},
        "training": {"steps": 2, "global_batch_size": 4, "max_length": 64},
        "resources": {"cluster": "anything", "nodes": 1},
    }


def run(folder: Path, document: dict[str, Any], *options: str) -> Result:
    (folder / "job.yaml").write_text(json.dumps(document))
    return CliRunner().invoke(app, [str(folder / "job.yaml"), str(folder / "jobs/one"), *options])


def test_a_jobs_folder_is_made_without_a_service(tmp_path: Path, document: dict[str, Any]) -> None:
    made = run(tmp_path, document, "--nodes", "2")
    assert made.exit_code == 0, made.output
    folder = tmp_path / "jobs/one"
    context = JobContext.model_validate_json((folder / "context.json").read_text())
    assert context.spec.resources.nodes == 2
    assert context.files == {str(tmp_path / "rows.jsonl"): str(tmp_path / "rows.jsonl")}
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["one"]
    # The batch job was queued again: what is there stays, whatever the file says now.
    assert run(tmp_path, {"name": "other"}).exit_code == 0
    assert JobContext.model_validate_json((folder / "context.json").read_text()) == context


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"algorithm": {"type": "sft", "no": 1}}, "algorithm"),
        ({"data": {"train": "/no/such/rows.jsonl"}}, "data.train"),
        ({"resources": "all"}, "resources"),
        ({"resources": {"kubernetes": {}}}, "resources.kubernetes"),
    ],
)
def test_a_file_that_is_no_job_leaves_nothing(
    tmp_path: Path, document: dict[str, Any], change: dict[str, Any], complaint: str
) -> None:
    refused = run(tmp_path, {**document, **change})
    assert refused.exit_code == 2
    assert complaint in refused.output
    assert list((tmp_path / "jobs").iterdir()) == []
