"""Real jobs over the REST API on a real SLURM: two machines, TP 2 over them, and their faults.

A job that is preempted, and then loses a machine, ends as the calm one does: the same metrics,
every row in its turn, the same weights to the bit, and each attempt counted.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.api.resources import JobResource
from service.client import Client
from tests.cluster.prometheus.server import Prometheus, assert_scraped, beside, prometheus
from tests.cluster.sites.slurm import Slurm, SlurmSite, slurm_up
from tests.cluster.whole_jobs import assert_as_calm, ended, grpo_job, until_checkpoint
from tests.end_to_end.conftest import ROWS_A_STEP, sft_job
from tests.end_to_end.conftest import model_root as model_root
from tests.end_to_end.conftest import rows as rows
from tests.end_to_end.service_process import ServiceProcess
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

STEPS, SAVE_EVERY = 60, 5
GRPO_STEPS, GRPO_SAVES = 16, 2
LAYOUT = {
    "parallel": {"tp": 2, "dp": 2},
    "resources": {
        "cluster": "slurm",
        "nodes": 2,
        "cpus_per_node": 2,
        "memory_gib_per_node": 8,
    },
}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Two machines, with an accounting database; the conformance suite has none. The folder's name
    is short, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="planish-slurm-") as folder:
        Path(folder).chmod(0o755)
        with slurm_up(Path(folder), accounting=True) as up:
            yield up


@pytest.fixture(scope="module")
def metrics_port() -> int:
    """For the drivers' own metrics; jobs run one after the other here."""
    return free_port()


@pytest.fixture(scope="module")
def service(slurm: Slurm, model_root: Path, metrics_port: int) -> Iterator[ServiceProcess]:
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
        "metrics_port": metrics_port,
    }
    clusters = folder / "clusters.yaml"
    clusters.write_text(json.dumps({"clusters": {"slurm": cluster}}))
    running = ServiceProcess(
        folder, port=free_port(), model_root=model_root, options=["--clusters", str(clusters)]
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def server(
    service: ServiceProcess, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus | None]:
    """A Prometheus beside SLURM, from before the first job; null where none is installed."""
    if shutil.which("prometheus") is None:
        yield None
        return
    config = beside(service.url.removeprefix("http://"), f"127.0.0.1:{metrics_port}")
    with prometheus(tmp_path_factory.mktemp("prometheus"), config) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[Client]:
    with service.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def sft(client: Client, model_root: Path, rows: Path) -> Callable[[str], JobResource]:
    """Submits the same SFT job under another name."""
    file = client.upload(rows)
    parts: dict[str, Any] = {
        "training": {"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
        "checkpoint": {"every_steps": SAVE_EVERY},
        **LAYOUT,
    }
    return lambda name: client.submit(sft_job(model_root, file.id, name=name, **parts))


@pytest.fixture(scope="module")
def calm_sft(
    client: Client, sft: Callable[[str], JobResource], server: Prometheus | None
) -> JobResource:
    """An SFT job that nothing happened to, while `server` looked on."""
    assert server is None or server.firing() == {}
    return ended(client, sft("calm"))


@pytest.fixture(scope="module")
def grpo(client: Client, calm_sft: JobResource) -> Callable[[str], JobResource]:
    """Submits the same GRPO job, which goes on from `calm_sft`, under another name."""
    parts: dict[str, Any] = {
        "training": {"steps": GRPO_STEPS, "global_batch_size": 8, "max_length": 128},
        "checkpoint": {"every_steps": GRPO_SAVES},
        **LAYOUT,
    }
    return lambda name: client.submit(grpo_job(calm_sft, name=name, **parts))


@pytest.fixture(scope="module")
def calm_grpo(client: Client, grpo: Callable[[str], JobResource]) -> JobResource:
    """A GRPO job that nothing happened to."""
    return ended(client, grpo("calm-grpo"))


def test_a_job_trains_over_two_machines(client: Client, calm_sft: JobResource) -> None:
    metrics = client.metrics(calm_sft.id)
    assert [row.step for row in metrics] == list(range(1, STEPS + 1))
    spans = [(row.values["data_start"], row.values["data_end"]) for row in metrics]
    assert spans == [(ROWS_A_STEP * s, ROWS_A_STEP * (s + 1)) for s in range(STEPS)]
    assert metrics[-1].values["loss"] < metrics[0].values["loss"]


def test_prometheus_scrapes_the_service_and_the_job_s_driver(
    client: Client, calm_sft: JobResource, server: Prometheus | None
) -> None:
    if server is None:
        pytest.skip("prometheus is not installed")
    assert_scraped(server, client, calm_sft)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_g01_preempted_and_then_bereft_of_a_machine_it_ends_as_if_nothing_had_happened(
    slurm: Slurm,
    client: Client,
    tmp_path: Path,
    algorithm: str,
    request: pytest.FixtureRequest,
) -> None:
    """SLURM starts the same job of its own again after either."""
    calm: JobResource = request.getfixturevalue(f"calm_{algorithm}")
    job, site = request.getfixturevalue(algorithm)("faulty"), SlurmSite(slurm.folder, slurm)
    until_checkpoint(client, job)
    site.preempt(f"planish-{job.id}-1")
    until_checkpoint(client, job, attempt=2)
    site.lose_node(f"planish-{job.id}-1")
    reasons = ["PREEMPTED", "NODE_FAILURE"]
    assert_as_calm(client, ended(client, job), calm, tmp_path, reasons)
    assert submissions(slurm, job) == 1


def submissions(slurm: Slurm, job: JobResource) -> int:
    """How many jobs of SLURM there were for a job of ours."""
    names = slurm.run("squeue", "--noheader", "--states=all", "--format=%j").split()
    return sum(name.startswith(f"planish-{job.id}-") for name in names)
