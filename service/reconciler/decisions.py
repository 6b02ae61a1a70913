"""What to do next for a job: a pure function of what is stored and what was seen.

The reconciler looks, decides, does one thing, and looks again. Nothing is remembered between two
looks but in the store, so it may be killed after any of them.
"""

from dataclasses import dataclass

from service.jobs.records import Attempt, Job
from service.jobs.states import JobState, Wish
from service.launchers.protocol import Observation, Phase
from service.spec import JobContext, Reason

_UNREADABLE = "this version of the service cannot read the stored job; submit it again"
_TIME_IS_OVER = (
    "stopped when `resources.time_limit_minutes` was over; submit it again with a higher limit, or "
    "go on from its last checkpoint"
)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do just now."""


@dataclass(frozen=True, slots=True)
class Queue:
    """PENDING -> QUEUED."""


@dataclass(frozen=True, slots=True)
class Open:
    """Open the next attempt, where the launcher has a place."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Write the attempt's files and hand it to its launcher."""

    attempt: Attempt
    context: JobContext


@dataclass(frozen=True, slots=True)
class MarkAlive:
    """The driver lives: the job runs."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Stop:
    """Write down that the attempt must end, and why."""

    attempt: Attempt
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class AskToEnd:
    """Have the launcher end all processes of the attempt. Changes no row and may be repeated."""

    attempt: Attempt
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing of the attempt is left: take in what it said, and write down how it ended."""

    attempt: Attempt
    seen: Observation
    context: JobContext | None


@dataclass(frozen=True, slots=True)
class EndUnstarted:
    """End a job that has no attempt alive."""

    state: JobState
    reason: Reason
    message: str


Action = Wait | Queue | Open | Submit | MarkAlive | Stop | AskToEnd | Finish | EndUnstarted


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All that a decision rests on."""

    job: Job
    context: JobContext | None
    """Null where this version of the service cannot read what an earlier one stored."""
    has_launcher: bool
    """Whether the service has the launcher that the job names."""
    attempt: Attempt | None
    """The newest, where it has not ended."""
    seen: Observation | None
    """What the launcher sees of `attempt`."""
    outcome_at: float | None
    """When the driver of `attempt` wrote its outcome, its last act."""
    now: float
    grace_seconds: float
    """How long an attempt may take to end by itself."""


def decide(look: Look) -> Action:
    """The next action for a job."""
    match look.job.state:
        case JobState.SUCCEEDED | JobState.FAILED | JobState.CANCELLED:
            return Wait()
        case JobState.PENDING | JobState.QUEUED | JobState.RECOVERING | JobState.PAUSED:
            return _decide_unstarted(look)
        case _:
            return _decide_live(look)


def _decide_unstarted(look: Look) -> Action:
    job = look.job
    if job.wish is Wish.CANCEL:
        return EndUnstarted(JobState.CANCELLED, Reason.CANCELLED, "cancelled before it ran")
    if job.state is JobState.PAUSED:
        return Wait()
    fault = _fault(look)
    if fault is not None:
        return EndUnstarted(JobState.FAILED, Reason.LAUNCH_FAILED, fault)
    if job.state is JobState.PENDING:
        return Queue()
    if job.retry_at is not None and look.now < job.retry_at:
        return Wait()
    return Open()


def _decide_live(look: Look) -> Action:
    if look.attempt is None:
        return Wait()
    if look.seen is None:
        return _decide_without_launcher(look, look.attempt)
    attempt, seen = look.attempt, look.seen
    if seen.phase is Phase.EXITED:
        if seen.leftovers:
            return AskToEnd(attempt, 0.0)
        return Finish(attempt, seen, look.context)
    if attempt.stop_asked_at is not None:
        left = attempt.stop_asked_at + _grace(look, attempt) - look.now
        return AskToEnd(attempt, max(0.0, left))
    if look.outcome_at is not None and look.now > look.outcome_at + look.grace_seconds:
        return AskToEnd(attempt, 0.0)  # it has said all, and hangs
    if look.job.wish is Wish.CANCEL:
        return Stop(attempt, Reason.CANCELLED, "cancelled by a user")
    if look.context is None:
        return Stop(attempt, Reason.LAUNCH_FAILED, _UNREADABLE)
    if _time_is_over(attempt, look.context, look.now):
        return Stop(attempt, Reason.TIMEOUT, _TIME_IS_OVER)
    if seen.phase is Phase.UNKNOWN:
        if look.job.state is JobState.STARTING:
            return Submit(attempt, look.context)
        return AskToEnd(attempt, 0.0)  # all about it was deleted; it must not come back
    if seen.phase is Phase.RUNNING and look.job.state is JobState.STARTING:
        return MarkAlive(attempt)
    return Wait()


def _decide_without_launcher(look: Look, attempt: Attempt) -> Action:
    """The service has no such cluster any more, so nobody knows how the attempt is.

    It is waited for, since the cluster may have left by mistake. What the driver itself said as its
    last act counts, and a user may let go of it.
    """
    nobody = f"this service has no cluster {attempt.launcher!r} any more"
    unseen = Observation(phase=Phase.EXITED, evidence=nobody)
    if look.outcome_at is not None or attempt.stop_reason is Reason.CANCELLED:
        return Finish(attempt, unseen, look.context)
    if look.job.wish is Wish.CANCEL:
        ends = f"cancelled by a user; {nobody}: what still runs there has to be ended by hand"
        return Stop(attempt, Reason.CANCELLED, ends)
    return Wait()


def _grace(look: Look, attempt: Attempt) -> float:
    """How long the attempt may take to end; one that is not cancelled finishes its step and saves
    first, for as long as its job allows."""
    if look.context is None or attempt.stop_reason is Reason.CANCELLED:
        return look.grace_seconds
    return look.grace_seconds + look.context.spec.faults.grace_seconds


def _time_is_over(attempt: Attempt, context: JobContext, now: float) -> bool:
    limit = context.spec.resources.time_limit_minutes
    return (
        limit is not None
        and attempt.started_at is not None
        and now - attempt.started_at >= 60 * limit
    )


def _fault(look: Look) -> str | None:
    if not look.has_launcher:
        return f"this service has no launcher {look.job.cluster!r} (`resources.cluster`)"
    return _UNREADABLE if look.context is None else None
