"""How an attempt ended, and whether another follows: pure functions.

Four witnesses, in this order: the driver's own outcome where it ended well, the service's reason
for stopping it, the driver's outcome where it failed for a cause of its own, the cluster. A driver
that was ended by a signal, or that lost ranks, cannot know why: there the cluster's reason stands
in for its own. Where none speaks, the driver died without a word, which is the machine's fault
until shown otherwise.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from service.jobs.records import Attempt
from service.jobs.states import JobState
from service.launchers.protocol import Observation
from service.spec import Outcome, Reason, RetrySpec


class Budget(Enum):
    """What a retry is taken from; the value is the field of `retry`."""

    INFRASTRUCTURE = "infrastructure"
    """The next try may end well with nothing changed."""
    USER_ERROR = "user_error"
    """The next try most likely ends in the same way."""


RETRIED_WITHIN: Mapping[Reason, Budget | None] = {
    Reason.USER_ERROR: Budget.USER_ERROR,
    Reason.INTERNAL_ERROR: Budget.USER_ERROR,
    Reason.OUT_OF_MEMORY: Budget.USER_ERROR,
    Reason.NAN_LOSS: Budget.USER_ERROR,
    Reason.ENVIRONMENT_ERRORS: Budget.USER_ERROR,
    Reason.NODE_FAILURE: Budget.INFRASTRUCTURE,
    Reason.WORKER_LOST: Budget.INFRASTRUCTURE,
    Reason.HUNG: Budget.INFRASTRUCTURE,
    Reason.PREEMPTED: Budget.INFRASTRUCTURE,
    Reason.LAUNCH_FAILED: Budget.INFRASTRUCTURE,
    Reason.TIMEOUT: None,
    Reason.CANCELLED: None,
}
"""Every reason, and the budget that a retry after it is taken from; None is never retried."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended; `reason` is null where it ended well."""

    reason: Reason | None
    message: str


def judge(attempt: Attempt, seen: Observation, outcome: Outcome | None, last_words: str) -> Verdict:
    """The verdict on an attempt of which nothing is left.

    Args:
        attempt: its row.
        seen: how its driver exited.
        outcome: what the driver said as its last act; null where it said nothing readable.
        last_words: the end of its log, quoted where there is no outcome.
    """
    if outcome is not None and outcome.status == "succeeded":
        return Verdict(None, outcome.message)
    if attempt.stop_reason is not None:
        return Verdict(attempt.stop_reason, attempt.message)
    if outcome is not None:
        return _failed(outcome, seen)
    message = f"the driver {_exit(seen)} and left no outcome"
    if seen.reason is not None and seen.evidence:
        message = f"{seen.evidence}; {message}"
    return Verdict(
        seen.reason or Reason.WORKER_LOST,
        f"{message}; its log ends:\n{last_words}" if last_words else message,
    )


def next_state(reason: Reason | None, failed_before: int, retry: RetrySpec | None) -> JobState:
    """What becomes of a job after an attempt with this verdict.

    Args:
        reason: of the verdict.
        failed_before: see `failures`.
        retry: the job's budgets; null allows none.
    """
    if reason is None:
        return JobState.SUCCEEDED
    if reason is Reason.CANCELLED:
        return JobState.CANCELLED
    budget = RETRIED_WITHIN[reason]
    if retry is None or budget is None:
        return JobState.FAILED
    allowed: int = getattr(retry, budget.value)
    return JobState.RECOVERING if failed_before < allowed else JobState.FAILED


def failures(
    reason: Reason, number: int, earlier: Sequence[Attempt], newest_steps: Mapping[int, int]
) -> int:
    """How many attempts before this one failed by the same kind of cause and got no further.

    A budget bounds the tries at one place. An attempt that published a checkpoint of a step that
    none before it had reached brought the job to another place, so what failed before it counts
    no more; its own failure does.

    Args:
        reason: why the attempt failed.
        number: of that attempt.
        earlier: the job's attempts before it.
        newest_steps: the highest step that each attempt published a checkpoint of.
    """
    since = _last_advance(number, newest_steps)
    return sum(
        attempt.number >= since
        and attempt.reason is not None
        and RETRIED_WITHIN[attempt.reason] is RETRIED_WITHIN[reason]
        for attempt in earlier
    )


def _last_advance(number: int, newest_steps: Mapping[int, int]) -> int:
    """The last attempt up to `number` that went beyond all before it; 0 where none did."""
    advance, reached = 0, -1
    for attempt in range(1, number + 1):
        step = newest_steps.get(attempt, -1)
        if step > reached:
            advance, reached = attempt, step
    return advance


_SYMPTOMS = frozenset({Reason.CANCELLED, Reason.PREEMPTED, Reason.WORKER_LOST, Reason.NODE_FAILURE})
"""What a driver says where something was done to it, or to its ranks, from outside."""


def _failed(outcome: Outcome, seen: Observation) -> Verdict:
    reason = outcome.reason or Reason.USER_ERROR
    # A signal that announces a time limit may announce a preemption (SLURM's send_user_signal).
    misread = reason is Reason.TIMEOUT and seen.reason is Reason.PREEMPTED
    if seen.reason is not None and (reason in _SYMPTOMS or misread):
        return Verdict(seen.reason, f"{seen.evidence or 'the cluster ended it'}. {outcome.message}")
    if reason is Reason.CANCELLED:
        # The service did not ask it to stop, so somebody else took its machine.
        return Verdict(
            Reason.PREEMPTED, f"ended by a signal that the service did not send. {outcome.message}"
        )
    return Verdict(reason, outcome.message)


def _exit(seen: Observation) -> str:
    if seen.exit_signal is not None:
        return f"was ended by {_signal_name(seen.exit_signal)}"
    if seen.exit_code is not None:
        return f"exited with code {seen.exit_code}"
    return "ended, unseen,"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # most real-time signals have no name
