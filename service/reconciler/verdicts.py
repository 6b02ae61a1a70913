"""How an attempt ended, and whether another follows: pure functions.

Three witnesses, in this order: the driver's own outcome where it ended well, the service's reason
for stopping it, the driver's outcome where it failed. Where none speaks, the driver died without a
word, which is the machine's fault until shown otherwise.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from service.jobs.records import Attempt
from service.jobs.states import JobState
from service.launchers.protocol import Observation
from service.spec import Outcome, Reason, RetrySpec

_NEVER_RETRIED = frozenset({Reason.CANCELLED, Reason.TIMEOUT})


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
        return _failed(outcome)
    message = f"the driver {_exit(seen)} and left no outcome"
    return Verdict(
        Reason.WORKER_LOST, f"{message}; its log ends:\n{last_words}" if last_words else message
    )


def next_state(
    reason: Reason | None, earlier: Sequence[Attempt], retry: RetrySpec | None
) -> JobState:
    """What becomes of a job after an attempt with this verdict.

    Args:
        reason: of the verdict.
        earlier: the job's attempts before this one.
        retry: the job's budgets; null allows none.
    """
    if reason is None:
        return JobState.SUCCEEDED
    if reason is Reason.CANCELLED:
        return JobState.CANCELLED
    if retry is None or reason in _NEVER_RETRIED:
        return JobState.FAILED
    budget = retry.infrastructure if reason.infrastructure else retry.user_error
    return JobState.RECOVERING if failures(reason, earlier) < budget else JobState.FAILED


def failures(reason: Reason, attempts: Sequence[Attempt]) -> int:
    """How many attempts failed by the same kind of cause, the machine's or the job's own."""
    return sum(
        attempt.reason is not None and attempt.reason.infrastructure == reason.infrastructure
        for attempt in attempts
    )


def _failed(outcome: Outcome) -> Verdict:
    reason = outcome.reason or Reason.USER_ERROR
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
