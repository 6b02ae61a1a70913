"""kill -9, of the service and of a rank, in the middle of a real job."""

import os
import signal
from pathlib import Path

import pytest

from service.api.resources import EventResource, MetricsRow
from service.client import Client
from tests.end_to_end.conftest import ROWS_A_STEP, STEPS, sft_job
from tests.end_to_end.job_processes import processes
from tests.end_to_end.service_process import ServiceProcess

pytestmark = pytest.mark.long


def until_step(client: Client, job: str, step: int) -> None:
    """Returns as soon as a checkpoint of this step or a later one is published."""
    for event in client.events(job):
        if event.kind == "checkpoint" and event.data["step"] >= step:
            return
    raise AssertionError(f"the job ended before a checkpoint of step {step}")


def assert_numbered_without_gap(events: list[EventResource]) -> None:
    assert [event.id for event in events] == list(range(1, len(events) + 1))


def assert_every_row_in_its_turn(metrics: list[MetricsRow]) -> None:
    """The steps that count took the endless sequence of epochs row by row, none left out.

    Positions count on over the epochs; which row stands at a position is a permutation of each
    epoch (tests/algorithms/data), so this is every row once an epoch.
    """
    position = 0
    for row in metrics:
        assert row.values["data_start"] == position
        position = int(row.values["data_end"])
    assert position == STEPS * ROWS_A_STEP


def test_a_service_that_is_killed_finds_its_job_again(
    service: ServiceProcess, model_root: Path, rows: Path
) -> None:
    with service.client() as client:
        file = client.upload(rows)
        job = client.submit(sft_job(model_root, file.id, name="survivor"))
        until_step(client, job.id, 30)
        service.kill()
        service.start()
        seen = list(client.events(job.id))
        ended = client.job(job.id)
        metrics = client.metrics(job.id)
    assert ended.state.value == "SUCCEEDED", ended.message
    assert_numbered_without_gap(seen)
    assert [attempt.number for attempt in ended.attempts] == [1]
    assert sum(event.kind == "started" for event in seen) == 1
    assert [row.step for row in metrics] == list(range(1, STEPS + 1))
    assert_every_row_in_its_turn(metrics)


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint(
    service: ServiceProcess, model_root: Path, rows: Path
) -> None:
    with service.client() as client:
        file = client.upload(rows)
        # No restart in place, so that the loss ends the attempt.
        parts = {"parallel": {"dp": 2}, "faults": {"restarts": 0}}
        job = client.submit(sft_job(model_root, file.id, name="phoenix", **parts))
        until_step(client, job.id, 30)
        os.kill(processes(job.id, "rank")[0].pid, signal.SIGKILL)
        seen = list(client.events(job.id))
        ended = client.job(job.id)
        metrics = client.metrics(job.id)
    assert ended.state.value == "SUCCEEDED", ended.message
    first, second = ended.attempts
    assert first.reason is not None
    assert first.reason.value == "WORKER_LOST"
    assert "rank" in first.message
    assert second.reason is None
    assert_numbered_without_gap(seen)
    resumed = [event.data["resumed_from_step"] for event in seen if event.kind == "started"]
    assert resumed[0] is None
    assert resumed[1] >= 30
    assert [row.step for row in metrics] == list(range(1, STEPS + 1))
    assert_every_row_in_its_turn(metrics)
