"""The driver's side of saves: in the background, refused by the storage, damaged."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from algorithms.errors import JobFailure
from megatron_backend.driver.recorder import SpoolRecorder
from service.spec import Reason
from tests.megatron_backend.driver import tiny_job
from tests.megatron_backend.driver.saves import (
    SIZE,
    Saves,
    drained,
    flushes,
    no_room_for_events,
    small_files,
)


def test_a_save_and_what_it_tells(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(keep_best={"metric": "loss", "higher_is_better": False}, keep_last=1)
    assert saves.resumed() is None
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, None)):
        evaluations = [] if loss is None else [{"mode": "validation", "loss": loss}]
        saves.save(step, evaluations=evaluations)
        assert saves.latest() == f"step-{step:08d}"
    assert saves.steps() == [2, 4]
    events = saves.events.of("checkpoint")
    assert [event["score"] for event in events] == [0.5, 0.25, 0.75, None]
    assert events[-1]["path"] == str(saves.root / "step-00000004")
    assert events[-1]["layout"]["tp"] == 2
    assert events[-1]["bytes"] > 2 * SIZE
    assert saves.resumed() == 4
    assert open_saves(attempt=2).resumed() == 4


def test_d01_h06_a_checkpoint_in_the_background_counts_once_it_is_on_disk(
    open_saves: Callable[..., Saves],
) -> None:
    saves = open_saves(async_save=True, keep_last=1)
    saves.save(1)
    saves.checkpoints.drain()
    saves.save(2)
    for process in flushes():
        process.suspend()
    saves.group.state = b"trained on"  # the copy is the ranks' own
    begun = time.monotonic()
    while time.monotonic() < begun + 3:
        saves.checkpoints.poll()
        assert saves.latest() == "step-00000001"
        assert saves.steps() == [1]
        assert len(saves.events.of("checkpoint")) == 1
        time.sleep(0.2)
    for process in flushes():
        process.resume()
    saves.save(3)  # waits for the one before
    assert saves.latest() == "step-00000002"
    saves.checkpoints.drain()
    assert saves.resumed() == 3
    assert saves.steps() == [3]
    slow = saves.events.of("checkpoint")[1]
    assert slow["seconds"] >= 3
    assert slow["stall_seconds"] < slow["seconds"]
    assert slow["requested_at"] <= time.time() - slow["seconds"]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_writer_that_is_killed(open_saves: Callable[..., Saves], retries: int) -> None:
    saves = open_saves(async_save=True, save_retries=retries)
    saves.save(1)
    saves.checkpoints.drain()
    saves.save(2)
    for process in flushes():
        process.suspend()
    flushes()[0].kill()
    for process in flushes():
        process.resume()
    saves.checkpoints.drain()
    assert not list(saves.root.glob(".tmp-*"))
    if retries:
        assert saves.events.of("warning") == []
        assert saves.resumed() == 2
        return
    (warning,) = saves.events.of("warning")
    assert "step 2 could not be saved" in warning["message"]
    assert "ended with signal 9" in warning["message"]
    assert saves.latest() == "step-00000001"


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.megatron_backend.driver.test_checkpoints import Saves, flushes
saves = Saves(Path(sys.argv[1]), async_save=True, keep_last=1)
saves.save(1)
saves.checkpoints.drain()
saves.save(2)
for process in flushes():
    process.suspend()
print(*(process.pid for process in flushes()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_d01_kill_9_of_everything_during_the_flush(
    open_saves: Callable[..., Saves], tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "job")], stdout=subprocess.PIPE, check=False
    )
    assert run.returncode == -signal.SIGKILL
    orphans = [psutil.Process(int(pid)) for pid in run.stdout.split()]
    assert len(orphans) == 2
    assert len(list((tmp_path / "job" / "checkpoints").glob(".tmp-*"))) == 1
    saves = open_saves(attempt=2)
    assert saves.latest() == "step-00000001"
    assert saves.resumed() == 1
    for orphan in orphans:
        orphan.resume()
    psutil.wait_procs(orphans, timeout=60)
    assert sorted(path.name for path in saves.root.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize("async_save", [False, True])
def test_d20_a_save_that_the_storage_refuses(
    open_saves: Callable[..., Saves], async_save: bool
) -> None:
    saves = open_saves(async_save=async_save, save_retries=2, max_missed=1)
    for step in range(1, 5):
        if step == 2:
            with small_files():
                saves.save(step)
                saves.checkpoints.drain()
            (warning,) = saves.events.of("warning")
            assert "step 2 could not be saved: File too large" in warning["message"]
            assert (warning["missed"], warning["tries"]) == (1, 3)
            assert saves.latest() == "step-00000001"
        else:
            saves.save(step)
            saves.checkpoints.drain()
    assert saves.steps() == [3, 4]
    assert len(saves.events.of("warning")) == 1
    with small_files():
        saves.save(5)
        saves.checkpoints.drain()
        with pytest.raises(JobFailure, match=r"File too large.*2 in a row") as failure:
            drained(saves, 6)
    assert failure.value.reason is Reason.NODE_FAILURE
    assert saves.latest() == "step-00000004"
    assert open_saves(attempt=2).resumed() == 4


def test_d20_training_goes_on_while_there_is_no_room_for_events(
    open_saves: Callable[..., Saves], spool_recorder: SpoolRecorder
) -> None:
    recorder, saves = spool_recorder, open_saves(recorder=spool_recorder)
    for step in range(1, 4):
        recorder.record("metrics", {"loss": 1 / step}, step=step)
        if step == 2:
            with no_room_for_events():
                recorder.record("sample", {"item": 0}, step=step)
                saves.save(step)  # what would have to be on disk before it is not
                recorder.record("sample", {"item": 1}, step=step)
            assert saves.latest() == "step-00000001"
        else:
            saves.save(step)
    assert saves.steps() == [3]
    told = tiny_job.events(saves.root.parent)
    assert [(event.seq, event.kind, event.step) for event in told] == [
        *((1, "metrics", 1), (2, "checkpoint", 1)),
        *((3, "metrics", 2), (4, "sample", 2), (5, "warning", 2), (6, "sample", 2)),
        *((7, "metrics", 3), (8, "checkpoint", 3)),
    ]
    message = "the checkpoint of step 2 could not be saved: No space left on device"
    assert told[4].data == {"message": message, "missed": 1, "tries": 2}


def test_the_storage_is_better_at_the_second_try(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(async_save=True, save_retries=1)
    saves.save(1)
    saves.checkpoints.drain()
    with small_files():
        saves.save(2)
    saves.group.state = b"trained on"
    saves.checkpoints.drain()  # once more, from the ranks' copies
    assert saves.events.of("warning") == []
    assert saves.resumed() == 2


def test_ranks_without_memory_for_their_copies_try_again(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(async_save=True, save_retries=1, max_missed=1)
    with small_files():  # memory that a process shares is a file
        saves.save(1)
    (warning,) = saves.events.of("warning")
    assert "step 1 could not be saved: File too large" in warning["message"]
    assert warning["tries"] == 2
    drained(saves, 2)
    assert saves.resumed() == 2


def test_the_storage_loses_a_file(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(async_save=True, save_retries=1)
    drained(saves, 1)
    saves.save(2)
    while flushes():
        time.sleep(0.05)
    (staged,) = saves.root.glob(".tmp-*")
    (staged / "state" / "__1_0.distcp").unlink()
    saves.checkpoints.drain()
    assert saves.events.of("warning") == []
    assert saves.resumed() == 2


def test_the_last_save_must_not_be_missed(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(save_retries=0, max_missed=10)
    with small_files(), pytest.raises(JobFailure, match="would have been the job's result"):
        saves.save(1, required=True)


def test_lost_ranks_take_their_unfinished_save_with_them(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(async_save=True)
    saves.save(1)
    saves.checkpoints.drain()
    saves.save(2)
    assert saves.resumed() == 1  # as after a restart of the ranks
    saves.checkpoints.drain()
    saves.save(2)
    saves.checkpoints.drain()
    assert saves.resumed() == 2
    assert not list(saves.root.glob(".tmp-*"))


def test_the_newest_is_damaged(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves()
    for step in (1, 2):
        saves.save(step)
    damage(saves.root / "step-00000002")
    again = open_saves(attempt=2)
    assert again.resumed() == 1
    (warning,) = again.events.of("warning")
    assert "step-00000002 is damaged and was set aside" in warning["message"]


def damage(checkpoint: Path) -> None:
    shard = checkpoint / "state" / "__1_0.distcp"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])


@pytest.mark.parametrize("loaded_before", [False, True])
def test_the_newest_is_damaged_while_the_attempt_lives(
    open_saves: Callable[..., Saves], loaded_before: bool
) -> None:
    """Ranks that are started anew and a job that goes back load as an attempt that starts does."""
    saves = open_saves()
    for step in (1, 2):
        saves.save(step)
    if loaded_before:
        assert saves.resumed() == 2
    damage(saves.root / "step-00000002")
    assert saves.resumed() == 1
    (warning,) = saves.events.of("warning")
    assert "step-00000002 is damaged and was set aside" in warning["message"]
    assert saves.latest() == "step-00000001"
    damage(saves.root / "step-00000001")
    with pytest.raises(JobFailure, match="step-00000001 is damaged, and so is every") as failure:
        saves.resumed()
    assert failure.value.reason is Reason.NODE_FAILURE
    assert open_saves(attempt=2).resumed() is None


def test_another_jobs_checkpoint_is_compared_at_each_load(
    open_saves: Callable[..., Saves], tmp_path: Path
) -> None:
    """It is what a job goes on from until it has one of its own, and where that is damaged."""
    Saves(tmp_path / "other").save(5)
    aside = tmp_path / "other" / "checkpoints" / "step-00000005"
    path = tiny_job.write_job(tmp_path / "job", parallel={"tp": 2}) / "context.json"
    resume = {"job": "job-1", "step": 5, "checkpoint": str(aside)}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"job_id": "job-2", "resume": resume})
    )
    saves = open_saves()
    assert saves.resumed() == 5
    saves.save(6)
    damage(saves.root / "step-00000006")
    assert saves.resumed() == 5
    damage(aside)
    with pytest.raises(JobFailure, match="the checkpoint of job-1 to go on from is damaged"):
        saves.resumed()


def test_a_checkpoint_of_another_release_ends_the_attempt(
    open_saves: Callable[..., Saves],
) -> None:
    saves = open_saves()
    saves.save(1)
    path = saves.root / "step-00000001" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(JobFailure, match="written by another release") as failure:
        open_saves(attempt=2)
    assert failure.value.reason is Reason.USER_ERROR
    assert saves.steps() == [1]
