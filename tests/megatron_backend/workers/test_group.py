"""How a group of ranks fails, finds out who is to blame, and goes on with new ones.

The ranks are real: Ray's actors, Megatron's process groups over gloo, a tiny model.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_backend.workers.frozen import FrozenRank, ScorerRank, TeacherRank
from megatron_backend.workers.hangs import PHASE_OF
from megatron_backend.workers.rank import RankWorker
from service.spec import DeadlineSpec
from tests.megatron_backend.driver import tiny_job

pytestmark = pytest.mark.slow

# In a process of its own: Ray leaves threads and sockets open that pytest would complain about.
PREPARE = """
import os, signal, sys, threading, time
from pathlib import Path
from megatron_backend.workers.ray_session import ray_session, set_environment
set_environment(3)
import torch
from algorithms.batch import Normalizer
from megatron_backend.checkpoint import contents
from megatron_backend.driver.job import open_job
from megatron_backend.workers.errors import RanksFailed, RanksHung, WorkerLost
from megatron_backend.workers.group import WorkerGroup
from megatron_backend.workers.rank import RankWorker
from service.spec import DeadlineSpec
from service.spec.layout import Layout
"""

FAILURES = """
from tests.megatron_backend.workers.rows import batch
job = open_job(Path(sys.argv[1]), 1)
deadlines = DeadlineSpec(step=float(sys.argv[2]))

def step():
    rows = batch()
    shares = group.call(RankWorker.train_step, rows, Normalizer.of(rows), learning_rate=1e-2)
    return [share.loss for share in shares]

def failure():
    try:
        step()
    except RanksFailed as error:
        return error

with ray_session(3, gpus=0):
    group = WorkerGroup(RankWorker, job.layout, gpu=False, deadlines=deadlines)
    try:
        group.call(RankWorker.load_state, "nowhere", True)
    except RuntimeError as error:
        note = error.__notes__[0]
        assert str(error)[:6] == note[3:9] and "in load_state" in note, (error, note)
        print(type(error).__name__, str(error)[6:])  # of whichever rank was first
    group.setup(job.context)
    priorities = {os.getpriority(os.PRIO_PROCESS, pid) for pid in group.pids}
    print("as the driver" if priorities == {os.getpriority(os.PRIO_PROCESS, 0)} else priorities)
    first = [step(), step()]
    pids = list(group.pids)

    # A rank that dies. Rank 2 waits for rank 0 as well, which lives and has failed.
    os.kill(group.pids[1], signal.SIGKILL)
    error = failure()
    print(type(error).__name__, error.ranks)
    group.replace(error.ranks)
    group.setup(job.context)
    print("kept", [rank for rank in range(3) if group.pids[rank] == pids[rank]])
    print("same" if [step(), step()] == first else "other")

    # A rank that is frozen: it answers nothing, and the others wait for it in a collective.
    os.kill(group.pids[2], signal.SIGSTOP)
    error = failure()
    print(type(error).__name__, error.ranks, "(`faults.deadlines.step`" in str(error))
    print("others wait:", str(error).count("waits for other ranks"))
    pids = list(group.pids)
    group.replace(error.ranks)
    group.setup(job.context)
    print("kept", [rank for rank in range(3) if group.pids[rank] == pids[rank]])
    print("same" if [step(), step()] == first else "other")

    # A rank that dies while another is frozen, which cannot be woken and so is replaced too.
    os.kill(group.pids[2], signal.SIGSTOP)
    os.kill(group.pids[1], signal.SIGKILL)
    error = failure()
    print(type(error).__name__, error.ranks)
    pids = list(group.pids)
    group.replace(error.ranks)
    group.setup(job.context)
    print("kept", [rank for rank in range(3) if group.pids[rank] == pids[rank]])
    print("same" if [step(), step()] == first else "other")

    # A save that takes three times as long as a step may: it has a limit of its own.
    staged = Path(sys.argv[1]) / "staged"
    for name in (contents.STATE, contents.RANDOM):
        (staged / name).mkdir(parents=True)
    os.kill(group.pids[0], signal.SIGSTOP)
    late = threading.Timer(3 * deadlines.step, os.kill, (group.pids[0], signal.SIGCONT))
    late.start()
    written = group.call(RankWorker.begin_save, str(staged), False)
    print("saved", [share.error for share in written])
    group.stop()
"""

OUT_OF_MEMORY = """
with ray_session(2, gpus=0):
    group = WorkerGroup(RankWorker, Layout(tp=2), gpu=False, deadlines=DeadlineSpec())
    try:
        while True:
            group.replace([0, 1])
            group.call(RankWorker.shutdown)
    except WorkerLost as error:
        print(type(error).__name__)
"""


def run(script: str, *arguments: object, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PREPARE + script, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line[:1] != "("]  # Ray's


@pytest.mark.long
def test_d21_ranks_that_die_or_hang_are_found_and_replaced(tmp_path: Path) -> None:
    job = tiny_job.write_job(tmp_path / "job", parallel={"dp": 3})
    assert run(FAILURES, job, 6.0) == [
        "RuntimeError  has no model yet: call setup first",
        "as the driver",
        "WorkerLost (1,)",
        "kept [0, 2]",
        "same",
        "RanksHung (2,) True",
        "others wait: 2",
        "kept [0, 1]",
        "same",
        "WorkerLost (1,)",
        "kept [0]",
        "same",
        "saved [None, None, None]",
    ]


def test_every_call_has_a_phase() -> None:
    kinds = (RankWorker, FrozenRank, TeacherRank, ScorerRank)
    calls = {name for kind in kinds for name, what in vars(kind).items() if callable(what)}
    public = {name for name in calls if not name.startswith("_")}
    assert public | {"prepare"} == set(PHASE_OF)
    assert set(PHASE_OF.values()) == set(DeadlineSpec.model_fields)


def test_a_machine_that_runs_out_of_memory() -> None:
    """Ray's own watch over the memory does the killing, at a limit that is passed at once."""
    lines = run(
        OUT_OF_MEMORY, RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="50"
    )
    assert lines == ["WorkerOutOfMemory"]
