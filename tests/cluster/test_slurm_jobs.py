"""Real jobs over the REST API on a real SLURM: two machines, TP 2 over them, and their faults.

A job that is preempted, and one that loses a machine, end as the calm one does: the same metrics,
every row in its turn, and each attempt counted.
"""

import json
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.api.resources import JobResource, MetricsRow
from service.client import Client
from tests.cluster.sites.slurm import Slurm, SlurmSite, slurm_up
from tests.end_to_end.conftest import ROWS_A_STEP, sft_job
from tests.end_to_end.conftest import model_root as model_root
from tests.end_to_end.conftest import rows as rows
from tests.end_to_end.service_process import ServiceProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

STEPS, SAVE_EVERY = 40, 5


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Two machines. The folder's name is short, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="planish-slurm-") as folder:
        Path(folder).chmod(0o755)
        with slurm_up(Path(folder)) as up:
            yield up


@pytest.fixture(scope="module")
def service(slurm: Slurm, model_root: Path) -> Iterator[ServiceProcess]:
    """`planish serve` whose only cluster is that SLURM."""
    folder = slurm.folder.parent
    cluster = {
        "type": "slurm",
        "partition": "batch",
        "python": sys.executable,
        "slurm_conf": str(slurm.conf),
        "poll_seconds": 0.5,
        "nodes": 2,
        "gpus_per_node": 0,
        "env": {"OMP_NUM_THREADS": "1"},
    }
    clusters = folder / "clusters.yaml"
    clusters.write_text(json.dumps({"clusters": {"slurm": cluster}}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = ServiceProcess(
        folder, port=port, model_root=model_root, options=["--clusters", str(clusters)]
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[Client]:
    with service.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def submit(client: Client, model_root: Path, rows: Path) -> Callable[[str], JobResource]:
    """Submits the same job under another name."""
    file = client.upload(rows)

    def submitted(name: str) -> JobResource:
        parts: dict[str, Any] = {
            "parallel": {"tp": 2, "dp": 2},
            "training": {"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
            "checkpoint": {"every_steps": SAVE_EVERY, "export": False},
            "resources": {
                "cluster": "slurm",
                "nodes": 2,
                "cpus_per_node": 2,
                "memory_gib_per_node": 8,
            },
        }
        return client.submit(sft_job(model_root, file.id, name=name, **parts))

    return submitted


@pytest.fixture(scope="module")
def calm(client: Client, submit: Callable[[str], JobResource]) -> list[MetricsRow]:
    """The metrics of a job that nothing happened to."""
    job = ended(client, submit("calm"))
    assert [attempt.reason for attempt in job.attempts] == [None]
    return client.metrics(job.id)


def ended(client: Client, job: JobResource) -> JobResource:
    """The job, when it has ended well."""
    for _ in client.events(job.id):
        pass
    found = client.job(job.id)
    log = client.log(job.id).text[-4000:]
    assert found.state.value == "SUCCEEDED", (found.reason, found.message, log)
    return found


def until_checkpoint(client: Client, job: str) -> None:
    for event in client.events(job):
        if event.kind == "checkpoint":
            return
    raise AssertionError(client.job(job).message)


def assert_as_calm(client: Client, job: JobResource, calm: list[MetricsRow], reason: str) -> None:
    """Two attempts, the second went on from the first's checkpoint, and no step shows it."""
    first, second = job.attempts
    assert first.reason is not None
    assert first.reason.value == reason, first.message
    assert second.reason is None
    started = [event for event in client.events(job.id) if event.kind == "started"]
    assert [event.attempt for event in started] == [1, 2]
    assert started[0].data["resumed_from_step"] is None
    assert started[1].data["resumed_from_step"] >= SAVE_EVERY
    metrics = client.metrics(job.id)
    assert [row.step for row in metrics] == list(range(1, STEPS + 1))
    spans = [(row.values["data_start"], row.values["data_end"]) for row in metrics]
    assert spans == [(ROWS_A_STEP * s, ROWS_A_STEP * (s + 1)) for s in range(STEPS)]
    for name in ("loss", "gradient_norm", "learning_rate", "tokens"):
        expected = [row.values[name] for row in calm]
        assert [row.values[name] for row in metrics] == pytest.approx(expected, rel=1e-6)


def test_a_job_trains_over_two_machines(calm: list[MetricsRow]) -> None:
    assert [row.step for row in calm] == list(range(1, STEPS + 1))
    assert calm[-1].values["loss"] < calm[0].values["loss"]


def test_g01_a_preempted_job_goes_on_when_slurm_starts_it_again(
    slurm: Slurm, client: Client, submit: Callable[[str], JobResource], calm: list[MetricsRow]
) -> None:
    job = submit("preempted")
    until_checkpoint(client, job.id)
    SlurmSite(slurm.folder, slurm).preempt(f"planish-{job.id}-1")
    found = ended(client, job)
    assert_as_calm(client, found, calm, "PREEMPTED")
    assert submissions(slurm, job) == 1


def test_a_job_that_loses_a_machine_goes_on_when_slurm_starts_it_again(
    slurm: Slurm, client: Client, submit: Callable[[str], JobResource], calm: list[MetricsRow]
) -> None:
    job = submit("bereft")
    until_checkpoint(client, job.id)
    SlurmSite(slurm.folder, slurm).lose_node(f"planish-{job.id}-1")
    found = ended(client, job)
    assert_as_calm(client, found, calm, "NODE_FAILURE")
    assert submissions(slurm, job) == 1


def submissions(slurm: Slurm, job: JobResource) -> int:
    """How many jobs of SLURM there were for a job of ours."""
    names = slurm.run("squeue", "--noheader", "--states=all", "--format=%j").split()
    return sum(name.startswith(f"planish-{job.id}-") for name in names)
