"""Whole jobs in a Ray that a cluster's launcher started, over two of its nodes.

The same job in a Ray of the driver's own, on one machine, is what each of them must equal.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.spec import Reason
from tests.megatron_backend.driver import tiny_job
from tests.megatron_backend.ray_cluster import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

GRPO: dict[str, Any] = {
    "parallel": {"tp": 2, "dp": 2},
    "algorithm": {"type": "grpo", "group_size": 4},
    "data": None,
    "environment": {"id": "reasoning_gym/chain_sum", "config": {"max_terms": 2, "max_digits": 1}},
    "rollout": {"max_new_tokens": 6, "layout": {"tp": 2}},
    "training": {"steps": 8, "global_batch_size": 8, "max_length": 128},
    "checkpoint": {"every_steps": 2, "export": False},
}
Start = Callable[..., subprocess.Popen[str]]
TWO_NODES = {"resources": {"nodes": 2}}
LOST = {"PLANISH_NODE_WAIT_SECONDS": "300"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes with room for two ranks each."""
    with RayCluster(cpus=[2, 2]) as running:
        yield running


@pytest.fixture
def start(cluster: RayCluster) -> Iterator[Start]:
    """Starts drivers in the cluster; what is left of them is ended afterwards."""
    started = []

    def start_one(folder: Path, **environment: str) -> subprocess.Popen[str]:
        driver = tiny_job.start(folder, environment=cluster.environment | environment)
        started.append(driver)
        return driver

    yield start_one
    for driver in started:
        driver.kill()
        driver.wait()


def write_job(folder: Path, **spec: Any) -> Path:
    """A tiny job whose model has room for 128 tokens."""
    tiny_job.write_job(folder, **spec)
    path = folder / "context.json"
    document = json.loads(path.read_text())
    document["model"]["config"]["max_position_embeddings"] = 128
    path.write_text(json.dumps(document))
    return folder


def numbers(folder: Path) -> list[tuple[int | None, float, float]]:
    return [
        (event.step, event.data["loss"], event.data["gradient_norm"])
        for event in tiny_job.events(folder, kind="metrics")
    ]


def test_grpo_whose_node_is_lost_and_replaced_equals_one_machine(
    tmp_path: Path, cluster: RayCluster, start: Start
) -> None:
    """Its weights go to generation copies on the other node by messages; when that node dies,
    another takes its place inside the attempt."""
    alone = write_job(tmp_path / "alone", **GRPO)
    assert tiny_job.start(alone).wait(400) == 0, tiny_job.log_text(alone)

    spread = write_job(tmp_path / "spread", **GRPO, **TWO_NODES)
    driver = start(spread, **LOST)
    tiny_job.wait_for(lambda: tiny_job.events(spread, kind="checkpoint"))
    os.kill(cluster.raylets[1], signal.SIGKILL)
    cluster.add(2)
    assert driver.wait(400) == 0, tiny_job.log_text(spread)
    (warning,) = tiny_job.events(spread, kind="warning")
    assert warning.data["reason"] == Reason.NODE_FAILURE
    assert len(tiny_job.events(spread, kind="started")) == 1
    assert numbers(spread) == numbers(alone)  # each step told once, with the same numbers
    assert [step for step, *_ in numbers(alone)] == list(range(1, 9))
