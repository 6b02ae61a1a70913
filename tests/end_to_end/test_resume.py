"""`resume` over REST, on another layout, with real drivers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_backend.checkpoint import contents
from service.client import Client
from tests.end_to_end.conftest import ROWS_A_STEP, sft_job
from tests.end_to_end.service_process import ServiceProcess

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

STEPS, SAVED = 12, 6


def losses(client: Client, job: str) -> dict[int, float]:
    """Of each step, once the job has ended well."""
    for _ in client.events(job):
        pass  # to the end
    ended = client.job(job)
    assert ended.state.value == "SUCCEEDED", (ended.reason, ended.message)
    return {row.step: row.values["loss"] for row in client.metrics(job)}


def weights(service: ServiceProcess, job: str, step: int) -> dict[str, torch.Tensor]:
    """The model in a checkpoint, whole, whatever layout wrote it."""
    checkpoint = service.data_dir / "jobs" / job / "checkpoints" / f"step-{step:08d}"
    reader = dcp.FileSystemReader(checkpoint / contents.STATE)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def test_a_job_goes_on_under_another_layout(
    service: ServiceProcess, model_root: Path, rows: Path
) -> None:
    """One goes on as the job did. One takes a single step that is too small to change a weight: it
    saves under its own layout what it has loaded."""
    resume = {"job": "whole", "step": SAVED, "layout": {"tp": 2}}
    still: dict[str, Any] = {
        "optimizer": {"learning_rate": 1e-30},
        "training": {"steps": SAVED + 1},
    }
    with service.client() as client:
        file = client.upload(rows)
        document = sft_job(
            model_root,
            file.id,
            name="whole",
            training={"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
            checkpoint={"every_steps": SAVED, "keep_every": SAVED, "export": False},
        )
        whole = client.submit(document).id
        calm = losses(client, whole)
        jobs = [
            client.submit({"name": name, "resume": resume, **parts}).id
            for name, parts in (("next", {}), ("still", still))
        ]
        found = [losses(client, job) for job in jobs]
        started = [
            [event.data for event in client.events(job) if event.kind == "started"] for job in jobs
        ]
    for (event,), ends in zip(started, (STEPS, SAVED + 1), strict=True):
        assert (event["resumed_from_step"], event["layout"]["tp"]) == (SAVED, 2), ends
    expected = {step: loss for step, loss in calm.items() if step > SAVED}
    assert found[0] == pytest.approx(expected, rel=1e-6)
    assert found[1] == pytest.approx({SAVED + 1: calm[SAVED + 1]}, rel=1e-6)
    before, after = weights(service, whole, SAVED), weights(service, jobs[1], SAVED + 1)
    assert before.keys() == after.keys()
    # Two ranks pad the vocabulary with more rows.
    assert all(torch.equal(after[name][: len(each)], each) for name, each in before.items())
    trained = weights(service, jobs[0], STEPS)
    assert not any(torch.equal(trained[name], tensor) for name, tensor in before.items())
