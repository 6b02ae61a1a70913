"""A real Prometheus scrapes `planish serve` while a real job trains; it sees what happens."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import Client
from tests.cluster.prometheus.server import Prometheus, beside, prometheus
from tests.end_to_end.conftest import model_root as model_root
from tests.end_to_end.conftest import rows as rows
from tests.end_to_end.conftest import sft_job
from tests.end_to_end.service_process import ServiceProcess
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

STEPS, SAVE_EVERY = 60, 20
JOB_SECONDS = 900.0
PAUSE_SECONDS = 0.3
"""The job and the questions share a machine."""


@pytest.fixture
def service(tmp_path: Path, model_root: Path) -> Iterator[ServiceProcess]:
    running = ServiceProcess(tmp_path, port=free_port(), model_root=model_root)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def server(service: ServiceProcess, tmp_path: Path) -> Iterator[Prometheus]:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    with prometheus(folder, beside(service.url.removeprefix("http://"))) as running:
        yield running


def test_prometheus_sees_what_the_job_did(
    service: ServiceProcess, server: Prometheus, model_root: Path, rows: Path
) -> None:
    here = '{algorithm="sft", cluster="local"}'
    steps = f"planish_training_steps_total{here}"
    server.wait_for_value(steps, 0)
    with service.client() as client:
        job = submit(client, model_root, rows)
        loss = f'planish_job_loss{{job_id="{job}"}}'
        seen = wait_until(
            lambda: server.value(loss), "its loss is scraped", JOB_SECONDS, pause=PAUSE_SECONDS
        )
        wait_until(
            lambda: client.job(job).state.value == "SUCCEEDED",
            "it ends",
            JOB_SECONDS,
            pause=PAUSE_SECONDS,
        )
        metrics = client.metrics(job)
    assert seen in {row.values["loss"] for row in metrics}
    assert [row.step for row in metrics] == list(range(1, STEPS + 1))
    server.wait_for_value(steps, STEPS)
    tokens = sum(row.values["tokens"] for row in metrics)
    server.wait_for_value(f"planish_training_tokens_total{here}", tokens)
    server.wait_for_value(f"planish_checkpoints_total{here}", STEPS / SAVE_EVERY)
    server.wait_for_value('planish_step_phase_seconds_count{phase="update"}', STEPS)
    server.wait_for_value('planish_jobs_finished_total{state="SUCCEEDED", cluster="local"}', 1)
    server.wait_until_gone(f'job_id="{job}"')
    assert server.firing() == {}


def submit(client: Client, model_root: Path, rows: Path) -> str:
    """A tiny SFT job; its id."""
    file = client.upload(rows)
    parts = {
        "training": {"steps": STEPS, "global_batch_size": 10, "max_length": 64},
        "checkpoint": {"every_steps": SAVE_EVERY, "export": False},
    }
    return client.submit(sft_job(model_root, file.id, name="watched", **parts)).id
