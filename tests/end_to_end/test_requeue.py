"""A cluster starts the next attempt by itself, before the service knows of any (SLURM's requeue).

The driver of attempt 2 raises the fence, goes on from the checkpoint and keeps its events. The
service, once it is back, opens attempt 2, finds it running, and has every event once.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.launchers import claim_and_exec
from service.launchers.environment import driver_environment
from service.spec import WorkerEvent
from service.spec.fence import read_fence
from tests.end_to_end.conftest import ROWS_A_STEP, sft_job
from tests.end_to_end.job_processes import processes
from tests.end_to_end.service_process import ServiceProcess
from tests.end_to_end.test_kill import assert_numbered_without_gap, until_step
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 400
SECONDS = 240.0


def start_attempt(job_dir: Path, attempt: int) -> None:
    """As the launcher would, so that it finds the attempt started."""
    folder = job_dir / "attempts" / str(attempt)
    folder.mkdir(parents=True)
    reading, writing = os.pipe()
    python = [sys.executable, "-I", "-S", claim_and_exec.__file__]
    driver = [sys.executable, "-m", "megatron_backend", str(job_dir)]
    driver += ["--attempt", str(attempt), "--log"]
    process = subprocess.Popen(
        [*python, str(folder / "process.json"), str(writing), *driver],
        cwd=job_dir,
        env=driver_environment(os.environ, job_dir.name, attempt),
        start_new_session=True,
        pass_fds=(writing,),
    )
    process.returncode = 0  # it may outlive this test's patience
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b""


def spooled(job_dir: Path, attempt: int) -> list[WorkerEvent]:
    path = job_dir / "attempts" / str(attempt) / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [WorkerEvent.model_validate_json(line) for line in lines]


def test_an_attempt_that_the_cluster_started_before_the_service_knew(
    service: ServiceProcess, model_root: Path, rows: Path
) -> None:
    training = {"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64}
    with service.client() as client:
        file = client.upload(rows)
        job = client.submit(sft_job(model_root, file.id, name="requeued", training=training))
        until_step(client, job.id, 30)
        job_dir = service.data_dir / "jobs" / job.id
        service.kill()
        for driver in processes(job.id, "driver"):
            os.kill(driver.pid, signal.SIGKILL)
        wait_until(lambda: not processes(job.id, "driver"), "the driver is gone", SECONDS)
        start_attempt(job_dir, 2)
        wait_until(
            lambda: any(event.kind == "metrics" for event in spooled(job_dir, 2)),
            "attempt 2 trains",
            SECONDS,
        )
        assert read_fence(job_dir) == 2
        assert not (job_dir / "attempts" / "2" / "outcome.json").exists()
        service.start()
        seen = list(client.events(job.id))
        ended = client.job(job.id)
        metrics = client.metrics(job.id)
    assert ended.state.value == "SUCCEEDED", ended.message
    assert [attempt.reason and attempt.reason.value for attempt in ended.attempts] == [
        "WORKER_LOST",
        None,
    ]
    assert_numbered_without_gap(seen)
    for attempt in (1, 2):
        written = spooled(job_dir, attempt)
        taken = [event for event in seen if event.attempt == attempt and event.kind != "state"]
        assert [(event.kind, event.step) for event in taken] == [
            (event.kind, event.step) for event in written
        ]
    spans = [(row.values["data_start"], row.values["data_end"]) for row in metrics]
    assert spans == [(ROWS_A_STEP * s, ROWS_A_STEP * (s + 1)) for s in range(STEPS)]
