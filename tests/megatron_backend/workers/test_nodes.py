"""Ranks on several machines: Ray's real nodes, of which one is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_backend.driver import tiny_job
from tests.megatron_backend.ray_cluster import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# In a process of its own: Ray leaves threads and sockets open that pytest would complain about.
SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
from megatron_backend.workers.ray_session import ray_session, set_environment
set_environment(4)
from algorithms.batch import Normalizer
from megatron_backend.driver.job import open_job
from megatron_backend.workers.draining import told_of_draining
from megatron_backend.workers.errors import NodeLost, RanksFailed
from megatron_backend.workers.group import WorkerGroup
from megatron_backend.workers.rank import RankWorker
from service.spec import DeadlineSpec
from tests.megatron_backend.workers.rows import batch
job = open_job(Path(sys.argv[1]), 1)
raylet = int(sys.argv[2])

def drain(node):
    from ray._private.worker import _global_node
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    ends = int(1000 * (time.time() + 600))
    accepted, _ = _global_node.get_gcs_client().drain_node(node, reason, "test", ends, timeout=60)
    assert accepted

def tell(*words):
    print("=", *words)

def open_group(nodes):
    return WorkerGroup(RankWorker, job.layout, gpu=False, deadlines=DeadlineSpec(), nodes=nodes)

def steps():
    rows = batch()
    def step():
        shares = group.call(
            RankWorker.train_step, rows, Normalizer.of(rows), learning_rate=1e-2)
        return [share.loss for share in shares]
    return [step(), step()]

def recover(failure):
    began = time.monotonic()
    moved = group.refill_room()
    print("room after", round(time.monotonic() - began), "s", file=sys.stderr)
    group.replace(moved | set(failure.ranks))
    group.setup(job.context)
    return sorted(moved)

with ray_session(4, gpus=0):
    group = open_group(nodes=1)
    group.setup(job.context)
    tell("one machine", len(set(group._nodes)))
    expected = steps()
    group.stop()

    group = open_group(nodes=2)
    group.setup(job.context)
    nodes = group._nodes
    tell("two machines", len(set(nodes)), nodes[0] == nodes[1], nodes[2] == nodes[3])
    tell("same" if steps() == expected else "other")
    tell("on the driver's" if group._here in nodes else "on others than the driver's")

    os.kill(raylet, signal.SIGKILL)
    began = time.monotonic()
    try:
        steps()
    except RanksFailed as failure:
        tell("lost" if type(failure) is NodeLost else repr(failure))
        print("seen after", round(time.monotonic() - began), "s:", failure, file=sys.stderr)
        tell("moved", len(recover(failure)))
    tell("same" if steps() == expected else "other")
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    with told_of_draining(lambda: group.nodes):
        drain(group._nodes[2])
        tell("told" if told.wait(60) else "not told")

    os.kill(int(sys.argv[3]), signal.SIGKILL)
    try:
        steps()
    except RanksFailed as failure:
        try:
            recover(failure)
        except NodeLost as lost:
            tell(lost)
    group.stop()
"""


def test_a_layout_over_two_machines_of_which_one_dies(tmp_path: Path) -> None:
    job = tiny_job.write_job(tmp_path / "job", parallel={"tp": 2, "dp": 2})
    with RayCluster(cpus=[4, 2]) as cluster:
        spare = cluster.add(2)
        first, second = cluster.raylets[1], spare
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(job), str(first), str(second)],
            env=os.environ | cluster.environment | {"PLANISH_NODE_WAIT_SECONDS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    lines = [line[2:] for line in result.stdout.splitlines() if line[:2] == "= "]
    assert lines[:-1] == [
        "one machine 1",
        "two machines 2 True True",
        "same",
        "on others than the driver's",
        "lost",
        "moved 2",
        "same",
        "told",
    ], result.stderr
    assert "is gone, and there was no other for 1 s" in lines[-1]
