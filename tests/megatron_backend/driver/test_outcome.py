"""Each way to fail has its reason, and the message says what a person needs."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from algorithms.errors import JobFailure
from megatron_backend.driver import outcome as outcome_module
from megatron_backend.driver.job import BadJobFolder
from megatron_backend.driver.outcome import MAX_MESSAGE, Stopped, outcome_of, write_outcome
from megatron_backend.workers.errors import (
    ConnectionLost,
    NodeLost,
    NoRoom,
    RanksHung,
    RayUnavailable,
    WorkerLost,
    WorkerOutOfMemory,
    WorkerPreempted,
)
from service.spec import Outcome, Reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (JobFailure(Reason.NAN_LOSS, "step 3: the loss is nan"), Reason.NAN_LOSS),
        (JobFailure(Reason.ENVIRONMENT_ERRORS, "3 of 4"), Reason.ENVIRONMENT_ERRORS),
        (Stopped(Reason.PREEMPTED, "stopped by SIGTERM"), Reason.PREEMPTED),
        (KeyboardInterrupt(""), Reason.CANCELLED),
        (RanksHung((1,), "ranks 0, 1 did not answer"), Reason.HUNG),
        (ConnectionLost((), "rank 0 lost the others"), Reason.NODE_FAILURE),
        (NodeLost(1, "its node has died"), Reason.NODE_FAILURE),
        (FloatingPointError("logits of row 3 are not finite"), Reason.NAN_LOSS),
        (WorkerLost(1, "exit code 137"), Reason.WORKER_LOST),
        (WorkerOutOfMemory(1, "the node ran low on memory"), Reason.OUT_OF_MEMORY),
        (WorkerPreempted(1, "drained"), Reason.PREEMPTED),
        (torch.OutOfMemoryError("CUDA out of memory"), Reason.OUT_OF_MEMORY),
        (MemoryError("no memory"), Reason.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
            Reason.OUT_OF_MEMORY,
        ),
        (NoRoom("no room for 8 ranks"), Reason.LAUNCH_FAILED),
        (RayUnavailable("Ray did not start"), Reason.LAUNCH_FAILED),
        (BadJobFolder("no context.json"), Reason.LAUNCH_FAILED),
        (OSError(errno.ENOSPC, "No space left on device"), Reason.NODE_FAILURE),
        (OSError(errno.ESTALE, "Stale file handle"), Reason.NODE_FAILURE),
        (torch.distributed.DistNetworkError("connection reset"), Reason.NODE_FAILURE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_reasons(error: BaseException, reason: Reason) -> None:
    outcome = outcome_of(error, 3)
    assert outcome.attempt == 3
    assert outcome.status == "failed"
    assert outcome.reason is reason
    assert outcome.message == str(error)


def test_a_good_end() -> None:
    assert outcome_of(None, 1) == Outcome(attempt=1, status="succeeded")


@pytest.mark.parametrize("error", [KeyError("weights"), FileNotFoundError(2, "No such file", "x")])
def test_what_was_not_foreseen_comes_with_its_place(error: Exception) -> None:
    try:
        raise error
    except type(error) as raised:
        outcome = outcome_of(raised, 1)
    assert outcome.reason is Reason.INTERNAL_ERROR
    assert "test_outcome.py" in outcome.message
    assert type(error).__name__ in outcome.message


def test_a_long_message_keeps_its_end() -> None:
    outcome = outcome_of(WorkerLost(0, "x" * 50_000 + "the end"), 1)
    assert len(outcome.message) == MAX_MESSAGE
    assert outcome.message.endswith("the end")


def test_written_whole(tmp_path: Path) -> None:
    outcome = outcome_of(WorkerLost(0, "killed"), 2)
    write_outcome(tmp_path, outcome)
    assert Outcome.model_validate_json((tmp_path / "outcome.json").read_text()) == outcome
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]


def test_it_waits_for_room_on_a_full_disk_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, replace, refused = outcome_of(WorkerLost(0, "killed"), 2), os.replace, [0]

    def full(source: Path, target: Path) -> None:
        refused[0] += 1
        if time.monotonic() < room_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(outcome_module, "ROOM_SECONDS", 0.5)
    room_from = float("inf")
    with pytest.raises(OSError, match="No space left"):
        write_outcome(tmp_path, outcome)
    assert list(tmp_path.iterdir()) == []
    tries, room_from = refused[0], time.monotonic() + 0.3
    write_outcome(tmp_path, outcome)
    assert tries >= 2
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
