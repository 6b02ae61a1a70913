"""What a driver does where its cluster has started the same command before, or does it early.

`service.spec.attempt` says what must come of it. The folders here hold no job, so an attempt that
does run ends at once, with LAUNCH_FAILED; what counts is whether it ran.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_backend.driver import run
from service.spec import Outcome, Reason
from service.spec.fence import exclusive_lock, read_fence
from tests.megatron_backend.driver import tiny_job

pytestmark = pytest.mark.usefixtures("own_signals")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_first_start_leaves_a_mark(tmp_path: Path) -> None:
    assert run.run_attempt(tmp_path, 1) == run.FAILED
    assert tiny_job.outcome(tmp_path).reason is Reason.LAUNCH_FAILED
    assert files(tmp_path / "attempts" / "1") == ["driver.lock", "outcome.json", "started"]


def test_a_second_start_after_the_first_was_lost_ends_as_a_lost_node(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "started").touch()
    assert run.run_attempt(tmp_path, 1) == run.FAILED
    outcome = tiny_job.outcome(tmp_path)
    assert outcome.reason is Reason.NODE_FAILURE
    assert "attempt 1 was started a second time by the cluster" in outcome.message
    assert files(attempt) == ["driver.lock", "outcome.json", "started"]  # no event: it did not run
    before = (attempt / "outcome.json").read_bytes()
    assert run.run_attempt(tmp_path, 1) == run.FAILED  # and a third
    assert (attempt / "outcome.json").read_bytes() == before


def test_a_second_start_after_a_good_end_says_so(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "started").touch()
    good = Outcome(attempt=1, status="succeeded").model_dump_json()
    (attempt / "outcome.json").write_text(good)
    assert run.run_attempt(tmp_path, 1) == run.SUCCEEDED
    assert (attempt / "outcome.json").read_text() == good


def test_a_start_beside_a_driver_that_lives_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LOCK_SECONDS", 0.1)
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    with exclusive_lock(attempt / "driver.lock", wait_seconds=0):
        assert run.run_attempt(tmp_path, 1) == run.STALE
    assert files(attempt) == ["driver.lock"]
    assert files(tmp_path) == ["attempts"]  # no fence either


def test_a_second_start_of_an_attempt_that_was_followed_says_nothing(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "started").touch()
    (tmp_path / "fence").write_text("2\n")
    assert run.run_attempt(tmp_path, 1) == run.STALE
    assert not (attempt / "outcome.json").exists()


def test_a_start_that_the_service_does_not_know_yet_raises_the_fence(tmp_path: Path) -> None:
    """SLURM queued the job again: its second start is the next attempt."""
    (tmp_path / "fence").write_text("1\n")
    assert run.run_attempt(tmp_path, 2) == run.FAILED
    assert read_fence(tmp_path) == 2
    assert tiny_job.outcome(tmp_path, 2).reason is Reason.LAUNCH_FAILED
    assert run.run_attempt(tmp_path, 1) == run.STALE  # should the first one come back


KILLED_AT_EVERY_LINE = """
import logging, os, signal, sys
from pathlib import Path
from megatron_backend.driver import run
logging.disable()
WATCHED = ("driver/run.py", "driver/outcome.py", "spec/durable.py", "spec/fence.py")

def killing_at(line):
    left = line
    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

def start(folder, line=None):
    pid = os.fork()
    if not pid:
        if line is not None:
            killing_at(line)
        os._exit(run.run_attempt(folder, 1))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

root, line, code = Path(sys.argv[1]), 0, -9
while code == -9:
    folder = root / str(line)
    attempt = folder / "attempts" / "1"
    folder.mkdir()
    code = start(folder, line)
    ended, begun = (attempt / "outcome.json").exists(), (attempt / "started").exists()
    second = start(folder)
    outcome = run.Outcome.model_validate_json((attempt / "outcome.json").read_text())
    print(ended, begun, second, outcome.reason)
    line += 1
"""


def test_kill_9_at_any_line_is_read_rightly_by_the_next_start(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_LINE, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    states = ran.stdout.splitlines()
    # (had its outcome, had begun): what the next start says
    readings = {
        "False False 1 LAUNCH_FAILED",  # as a first start
        "False True 1 NODE_FAILURE",
        "True True 1 LAUNCH_FAILED",  # what the first one said
    }
    assert set(states) == readings
    assert len(states) > 60
    assert states == sorted(states)  # in that order, the later the kill
