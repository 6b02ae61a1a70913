"""The states of a job and of an attempt, and the moves between them, as data.

The user writes a wish (`Wish`); only the reconciler and the ingest of worker events move a job, and
the store refuses every move that is not in `MOVES`. A terminal state has no move out of it, so a
late sweep or a stale worker can never rewrite how a job ended.
"""

from collections.abc import Mapping
from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands."""

    PENDING = "PENDING"
    """Stored; nobody has looked at it yet."""
    QUEUED = "QUEUED"
    """Accepted; waits for a free place on its launcher."""
    STARTING = "STARTING"
    """An attempt is being started; no sign of life yet."""
    RUNNING = "RUNNING"
    """The attempt's driver lives."""
    PAUSING = "PAUSING"
    """Asked to save its state and stop."""
    PAUSED = "PAUSED"
    """Stopped, with a checkpoint to go on from."""
    RECOVERING = "RECOVERING"
    """An attempt failed and another will follow; the place on the launcher is kept."""
    CANCELLING = "CANCELLING"
    """Asked to stop for good; its processes are being ended."""
    SUCCEEDED = "SUCCEEDED"
    """Ended well."""
    FAILED = "FAILED"
    """Ended badly, with a reason."""
    CANCELLED = "CANCELLED"
    """Ended by a user's wish; none of its processes is left."""

    @property
    def terminal(self) -> bool:
        """True where no move leads out."""
        return not MOVES[self]

    @property
    def holds_place(self) -> bool:
        """True where the job counts against its launcher's capacity."""
        return self in _HOLDS_PLACE


class AttemptState(StrEnum):
    """Where an attempt stands."""

    STARTING = "STARTING"
    """Written down before the launcher is asked, so that it is never started twice."""
    RUNNING = "RUNNING"
    """It has shown a sign of life."""
    ENDED = "ENDED"
    """None of its processes is left; it may publish nothing any more."""


class Wish(StrEnum):
    """What the user wants of a job; the reconciler makes it so."""

    RUN = "run"
    CANCEL = "cancel"


MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.QUEUED, JobState.CANCELLING, JobState.FAILED}),
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLING, JobState.FAILED}),
    JobState.STARTING: frozenset(
        {
            JobState.RUNNING,
            JobState.RECOVERING,
            JobState.PAUSING,
            JobState.CANCELLING,
            JobState.FAILED,
        }
    ),
    JobState.RUNNING: frozenset(
        {
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.RECOVERING,
            JobState.PAUSING,
            JobState.CANCELLING,
        }
    ),
    JobState.PAUSING: frozenset(
        {
            JobState.PAUSED,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.RECOVERING,
            JobState.CANCELLING,
        }
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLING}),
    JobState.RECOVERING: frozenset({JobState.STARTING, JobState.CANCELLING, JobState.FAILED}),
    # A job that ended well before the signal reached it did end well.
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""The legal moves: state -> the states that may follow it."""

_HOLDS_PLACE = frozenset(
    {
        JobState.STARTING,
        JobState.RUNNING,
        JobState.PAUSING,
        JobState.RECOVERING,
        JobState.CANCELLING,
    }
)

TERMINAL: frozenset[JobState] = frozenset(state for state in JobState if state.terminal)
"""The states that are final."""


class IllegalMove(Exception):
    """A move that `MOVES` does not hold. Nothing was changed."""

    def __init__(self, job_id: str, old: JobState, new: JobState) -> None:
        super().__init__(
            f"job {job_id} is {old} and cannot become {new}"
            + (": a terminal state is final" if old.terminal else "")
        )
        self.job_id = job_id
        self.old = old
        self.new = new


def check_move(job_id: str, old: JobState, new: JobState) -> None:
    """Refuses a move that is not in the table.

    Raises:
        IllegalMove: `new` may not follow `old`.
    """
    if new not in MOVES[old]:
        raise IllegalMove(job_id, old, new)
