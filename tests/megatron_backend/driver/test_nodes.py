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

STEPS = 16
SFT: dict[str, Any] = {
    "parallel": {"tp": 2, "dp": 2},
    "training": {"steps": STEPS, "global_batch_size": 6, "max_length": 16},
    "checkpoint": {"every_steps": 4, "export": False},
}
GRPO: dict[str, Any] = {
    "parallel": {"tp": 2, "dp": 2},
    "algorithm": {"type": "grpo", "group_size": 4},
    "data": None,
    "environment": {"id": "reasoning_gym/chain_sum", "config": {"max_terms": 2, "max_digits": 1}},
    "rollout": {"max_new_tokens": 6, "layout": {"tp": 2}},
    "training": {"steps": 1, "global_batch_size": 8, "max_length": 128},
    "checkpoint": {"export": False},
}
Start = Callable[..., subprocess.Popen[str]]
TWO_NODES = {"resources": {"nodes": 2}}
LOST = {"PLANISH_NODE_WAIT_SECONDS": "1"}


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


def saved_step(folder: Path, step: int) -> bool:
    return any(event.step == step for event in tiny_job.events(folder, kind="checkpoint"))


def test_grpo_over_two_nodes_equals_one_machine(tmp_path: Path, start: Start) -> None:
    """Its weights go to generation copies on the other node by messages."""
    alone = write_job(tmp_path / "alone", **GRPO)
    assert tiny_job.start(alone).wait(400) == 0, tiny_job.log_text(alone)
    spread = write_job(tmp_path / "spread", **GRPO, **TWO_NODES)
    assert start(spread).wait(400) == 0, tiny_job.log_text(spread)
    assert numbers(spread) == numbers(alone)
    assert len(numbers(alone)) == 1


def test_a_lost_node_is_replaced_and_one_too_many_ends_the_attempt(
    tmp_path: Path, cluster: RayCluster, start: Start
) -> None:
    calm = write_job(tmp_path / "calm", **SFT)
    assert tiny_job.start(calm).wait(400) == 0, tiny_job.log_text(calm)

    cluster.add(2)
    sick = write_job(tmp_path / "sick", **SFT, **TWO_NODES)
    driver = start(sick, **LOST)
    tiny_job.wait_for(lambda: saved_step(sick, 4))
    os.kill(cluster.raylets[1], signal.SIGKILL)
    assert driver.wait(400) == 0, tiny_job.log_text(sick)
    (warning,) = tiny_job.events(sick, kind="warning")
    assert warning.data["reason"] == Reason.NODE_FAILURE
    assert numbers(sick) == numbers(calm)  # each step told once, with the same numbers

    endless = {**SFT, "training": {**SFT["training"], "steps": 1_000_000}}
    dying = write_job(tmp_path / "dying", **endless, **TWO_NODES)
    driver = start(dying, **LOST)
    tiny_job.wait_for(lambda: saved_step(dying, 4))
    os.kill(cluster.raylets[0], signal.SIGKILL)
    assert driver.wait(400) == 1, tiny_job.log_text(dying)
    outcome = tiny_job.outcome(dying)
    assert outcome.reason is Reason.NODE_FAILURE
    assert "is gone, and there was no other for 1 s" in outcome.message
