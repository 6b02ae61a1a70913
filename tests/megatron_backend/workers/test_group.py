"""How a group of ranks fails: with a rank's own error, or with the death of one."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# In a process of its own: Ray leaves threads and sockets open that pytest would complain about.
PREPARE = """
from megatron_backend.workers.ray_session import ray_session, set_environment
set_environment(2)
from service.spec.layout import Layout
from megatron_backend.workers.errors import WorkerLost, WorkerOutOfMemory
from megatron_backend.workers.group import WorkerGroup
"""

ERRORS = """
import os, signal, threading
with ray_session(2, gpus=0):
    group = WorkerGroup(Layout(tp=2), gpu=False)
    try:
        group.call("load_state", "nowhere", True)
    except RuntimeError as error:
        note = error.__notes__[0]
        assert str(error)[:6] == note[3:9] and "in load_state" in note, (error, note)
        print(type(error).__name__, str(error)[6:])  # rank 0 or 1, whichever was first
    addresses = group.call("prepare")
    print(len(addresses), len({pid for _, _, pid in addresses}))
    priorities = {os.getpriority(os.PRIO_PROCESS, pid) for _, _, pid in addresses}
    print("as the driver" if priorities == {os.getpriority(os.PRIO_PROCESS, 0)} else priorities)
    os.kill(addresses[1][2], signal.SIGKILL)
    try:
        group.call("prepare")
    except WorkerLost as error:
        print(type(error).__name__, error.rank)
"""

OUT_OF_MEMORY = """
with ray_session(2, gpus=0):
    group = WorkerGroup(Layout(tp=2), gpu=False)
    try:
        while True:
            group.call("prepare")
    except WorkerLost as error:
        print(type(error).__name__)
"""


def run(script: str, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PREPARE + script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line[:1] != "("]  # Ray's


def test_an_error_of_a_rank_and_the_death_of_one() -> None:
    assert run(ERRORS) == [
        "RuntimeError  has no model yet: call setup first",
        "2 2",
        "as the driver",
        "WorkerLost 1",
    ]


def test_a_machine_that_runs_out_of_memory() -> None:
    """Ray's own watch over the memory does the killing, at a limit that is passed at once."""
    lines = run(
        OUT_OF_MEMORY, RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="50"
    )
    assert lines == ["WorkerOutOfMemory"]
