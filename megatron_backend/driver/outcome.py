"""How an attempt ended, in words and in a reason from the contract's closed list."""

import errno
import time
import traceback
from pathlib import Path

import torch

from algorithms.errors import JobFailure
from megatron_backend.driver.job import BadJobFolder
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
from service.spec.durable import STORAGE_FULL, replace_text

MAX_MESSAGE = 20_000
ROOM_SECONDS = 30.0
"""How long an outcome waits for room on a full disk. The ranks are gone by then."""
_PAUSE_SECONDS = 0.5
_STORAGE_ERRORS = {
    *(errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.ENOTCONN, errno.EROFS),
    *(errno.ESTALE, errno.ETIMEDOUT),
}
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "Cannot allocate memory", "CUDA out of memory")


class Stopped(BaseException):
    """The driver was told to end, and has no more time to save."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def write_outcome(attempt_folder: Path, outcome: Outcome) -> None:
    """Writes outcome.json, the driver's last act, in one atomic step.

    Raises:
        OSError: the disk fails, or is full for `ROOM_SECONDS`. The service then sees an attempt
            that ended without an outcome, and quotes its log.
    """
    path, text = attempt_folder / "outcome.json", outcome.model_dump_json(indent=1) + "\n"
    ends = time.monotonic() + ROOM_SECONDS
    while True:
        try:
            return replace_text(path, text)
        except OSError as error:
            if error.errno not in STORAGE_FULL or time.monotonic() >= ends:
                raise
        time.sleep(_PAUSE_SECONDS)


def outcome_of(error: BaseException | None, attempt: int) -> Outcome:
    """What an attempt's end means; None is a good end."""
    if error is None:
        return Outcome(attempt=attempt, status="succeeded")
    reason = reason_of(error)
    message = str(error)
    if reason is None:
        # Not foreseen, so whoever looks into it needs the place.
        reason = Reason.INTERNAL_ERROR
        message = "".join(traceback.format_exception(error))
    if len(message) > MAX_MESSAGE:  # the end of a traceback says most
        message = "..." + message[-(MAX_MESSAGE - 3) :]
    return Outcome(attempt=attempt, status="failed", reason=reason, message=message)


def reason_of(error: BaseException) -> Reason | None:
    """The reason that belongs to an error; None where it was not foreseen."""
    match error:
        case JobFailure() | Stopped():
            return error.reason
        case KeyboardInterrupt():
            return Reason.CANCELLED
        case WorkerOutOfMemory() | MemoryError() | torch.OutOfMemoryError():
            return Reason.OUT_OF_MEMORY
        case WorkerPreempted():
            return Reason.PREEMPTED
        case RanksHung():
            return Reason.HUNG
        case NodeLost() | ConnectionLost():
            return Reason.NODE_FAILURE
        case WorkerLost():
            return Reason.WORKER_LOST
        case NoRoom() | RayUnavailable() | BadJobFolder():
            return Reason.LAUNCH_FAILED
        case torch.distributed.DistNetworkError():
            # Another rank's machine, or the network between them, went away.
            return Reason.NODE_FAILURE
        case FloatingPointError():
            # The sampler's: logits that are no numbers.
            return Reason.NAN_LOSS
        case OSError() if error.errno in _STORAGE_ERRORS:
            return Reason.NODE_FAILURE
        case RuntimeError() if any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
            return Reason.OUT_OF_MEMORY
    return None
