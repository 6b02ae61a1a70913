"""Going on with another job's checkpoint, with real Ray and real ranks.

Nothing in fine-tuning without dropout draws random numbers, so these jobs have an algorithm that
does: else a generator that is not restored would be where it has to be.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from service.spec import WorkerEvent
from tests.megatron_backend.driver import tiny_job
from tests.megatron_backend.workers import flawed_algorithm

pytestmark = pytest.mark.long

STEPS, SAVED = 9, 6
SPEC: dict[str, Any] = {
    "checkpoint": {"every_steps": 3, "keep_every": 3, "keep_last": 1, "async_save": True},
    "training": {"steps": STEPS, "global_batch_size": 6, "max_length": 16},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that ran to its end in one go, saving in the background."""
    folder = tmp_path_factory.mktemp("jobs") / "whole"
    return run(tiny_job.write_job(folder, **SPEC, parallel={"dp": 2}))


def run(folder: Path, **changes: Any) -> Path:
    """The job, with some fields of its context changed, after it ended well."""
    path = folder / "context.json"
    document = json.loads(path.read_text()) | changes
    document["spec"]["algorithm"] = {"type": "flawed", "draws": True}
    path.write_text(json.dumps(document))
    environment = flawed_algorithm.environment(folder / "packages")
    driver = tiny_job.start(folder, environment=environment)
    assert driver.wait(600) == 0, tiny_job.log_text(folder)
    return folder


def resume(whole: Path, folder: Path, *, export: bool, **parallel: Any) -> Path:
    """A job that goes on with the checkpoint, as the service resolves `resume`."""
    spec = SPEC | {"checkpoint": SPEC["checkpoint"] | {"export": export}}
    tiny_job.write_job(folder, **spec, parallel=parallel)
    checkpoint = whole / "checkpoints" / f"step-{SAVED:08d}"
    resumed = {"job": "job-1", "step": SAVED, "checkpoint": str(checkpoint)}
    return run(folder, job_id="job-2", resume=resumed)


def metrics(folder: Path) -> list[WorkerEvent]:
    return tiny_job.events(folder, kind="metrics")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "exports" / f"step-{STEPS:08d}" / "model.safetensors")


def test_saves_in_the_background(whole: Path) -> None:
    saved = tiny_job.events(whole, kind="checkpoint")
    assert [event.step for event in saved] == [3, 6, 9]
    for event in saved:
        assert 0 < event.data["stall_seconds"] <= event.data["seconds"]
        assert event.data["requested_at"] + event.data["seconds"] <= event.time + 0.1
    assert len(list((whole / "checkpoints").glob("step-*"))) == 3
    assert not list((whole / "checkpoints").glob(".*"))


def test_d03_d14_the_same_layout_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    job = resume(whole, tmp_path / "same", export=True, dp=2)
    (started,) = tiny_job.events(job, kind="started")
    assert started.data["resumed_from_step"] == SAVED
    names = ("loss", "gradient_norm", "learning_rate", "data_epoch", "data_start", "data_end")
    expected = [[event.data[name] for name in names] for event in metrics(whole)[SAVED:]]
    assert [[event.data[name] for name in names] for event in metrics(job)] == expected
    assert [event.step for event in metrics(job)] == list(range(SAVED + 1, STEPS + 1))
    tensors = exported(whole)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in exported(job).items())
    saved = tiny_job.checkpoint_files(whole, STEPS)
    first, second = (saved[f"random/rank-0000{rank}.safetensors"] for rank in range(2))
    assert first != second
    assert tiny_job.checkpoint_files(job, STEPS) == saved


def test_another_layout_goes_on_alike(whole: Path, tmp_path: Path) -> None:
    job = resume(whole, tmp_path / "other", export=False, tp=2)
    expected = [event.data["loss"] for event in metrics(whole)[SAVED:]]
    assert [event.data["loss"] for event in metrics(job)] == pytest.approx(expected, rel=1e-6)
    spans = [(event.data["data_start"], event.data["data_end"]) for event in metrics(job)]
    assert spans == [(6 * step, 6 * step + 6) for step in range(SAVED, STEPS)]
