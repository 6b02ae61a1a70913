from dataclasses import replace

import pytest

from service.jobs import Attempt, JobState
from service.launchers import Observation, Phase
from service.reconciler.verdicts import (
    RETRIED_WITHIN,
    Budget,
    Verdict,
    failures,
    judge,
    next_state,
)
from service.spec import Outcome, Reason, RetrySpec
from tests.service.reconciler.test_decisions import ATTEMPT, STOPPED

EXITED = Observation(phase=Phase.EXITED)
SUCCEEDED = Outcome(attempt=1, status="succeeded")
STOPPED_BY_USER = replace(STOPPED, message="cancelled by a user")


def failed(reason: Reason | None) -> Outcome:
    return Outcome(attempt=1, status="failed", reason=reason, message="what it says")


def ended(*reasons: Reason) -> list[Attempt]:
    return [
        replace(ATTEMPT, number=number, reason=reason) for number, reason in enumerate(reasons, 1)
    ]


def test_an_attempt_that_ended_well_did_so_even_if_it_was_asked_to_stop() -> None:
    assert judge(ATTEMPT, EXITED, SUCCEEDED, "") == Verdict(None, "")
    assert judge(STOPPED_BY_USER, EXITED, SUCCEEDED, "") == Verdict(None, "")


def test_the_service_knows_best_why_it_stopped_an_attempt() -> None:
    cancelled = Verdict(Reason.CANCELLED, "cancelled by a user")
    assert judge(STOPPED_BY_USER, EXITED, None, "log") == cancelled
    assert judge(STOPPED_BY_USER, EXITED, failed(Reason.CANCELLED), "log") == cancelled


def test_a_driver_says_why_it_failed() -> None:
    verdict = judge(ATTEMPT, EXITED, failed(Reason.NAN_LOSS), "log")
    assert verdict == Verdict(Reason.NAN_LOSS, "what it says")
    assert judge(ATTEMPT, EXITED, failed(None), "").reason is Reason.USER_ERROR


def test_a_signal_that_the_service_did_not_send_took_the_machine() -> None:
    verdict = judge(ATTEMPT, EXITED, failed(Reason.CANCELLED), "")
    assert verdict.reason is Reason.PREEMPTED
    assert "what it says" in verdict.message


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(EXITED, exit_signal=9), "was ended by SIGKILL"),
        (replace(EXITED, exit_signal=40), "was ended by signal 40"),
        (replace(EXITED, exit_code=3), "exited with code 3"),
        (EXITED, "ended, unseen,"),
    ],
)
def test_a_driver_that_died_without_a_word_is_lost(seen: Observation, words: str) -> None:
    verdict = judge(ATTEMPT, seen, None, "the last line")
    assert verdict.reason is Reason.WORKER_LOST
    assert words in verdict.message
    assert verdict.message.endswith("the last line")
    assert judge(ATTEMPT, seen, None, "").message.endswith("left no outcome")


RETRY = RetrySpec(infrastructure=2, user_error=1)


def of_budget(budget: Budget | None) -> list[Reason]:
    return [reason for reason, taken_from in RETRIED_WITHIN.items() if taken_from is budget]


def test_every_reason_has_its_place_in_the_table() -> None:
    assert set(RETRIED_WITHIN) == set(Reason)
    assert Reason.HUNG in of_budget(Budget.INFRASTRUCTURE)
    assert of_budget(None) == [Reason.TIMEOUT, Reason.CANCELLED]
    assert all(hasattr(RetrySpec(), budget.value) for budget in Budget)


@pytest.mark.parametrize("reason", of_budget(Budget.INFRASTRUCTURE))
def test_faults_of_the_machine_have_their_own_budget(reason: Reason) -> None:
    assert next_state(reason, 1, RETRY) is JobState.RECOVERING
    assert next_state(reason, 2, RETRY) is JobState.FAILED
    assert failures(reason, 3, ended(Reason.NODE_FAILURE, Reason.USER_ERROR), {}) == 1
    assert failures(reason, 3, ended(Reason.NODE_FAILURE, Reason.WORKER_LOST), {}) == 2


@pytest.mark.parametrize("reason", of_budget(Budget.USER_ERROR))
def test_faults_of_the_job_have_their_own_budget(reason: Reason) -> None:
    assert next_state(reason, 0, RETRY) is JobState.RECOVERING
    assert next_state(reason, 1, RETRY) is JobState.FAILED
    assert next_state(reason, 0, RetrySpec()) is JobState.FAILED
    assert failures(reason, 3, ended(Reason.NODE_FAILURE, Reason.WORKER_LOST), {}) == 0
    assert failures(reason, 2, ended(Reason.NAN_LOSS), {}) == 1


@pytest.mark.parametrize(
    ("newest_steps", "counted"),
    [
        ({}, 3),
        ({1: 20}, 3),  # the first one's own failure is the first at its place
        ({1: 20, 2: 30}, 2),
        ({1: 20, 2: 20, 3: 30}, 1),
        ({1: 20, 2: 30, 3: 30}, 2),  # saved the same step again: no further
        ({1: 20, 2: 30, 3: 25}, 2),
        ({1: 20, 4: 40}, 0),  # the one that just failed got further than all before
    ],
)
def test_a_newer_checkpoint_begins_the_count_anew(
    newest_steps: dict[int, int], counted: int
) -> None:
    earlier = ended(Reason.PREEMPTED, Reason.PREEMPTED, Reason.HUNG)
    assert failures(Reason.PREEMPTED, 4, earlier, newest_steps) == counted


def test_some_ends_are_final() -> None:
    assert next_state(None, 0, RETRY) is JobState.SUCCEEDED
    assert next_state(Reason.CANCELLED, 0, RETRY) is JobState.CANCELLED
    assert next_state(Reason.TIMEOUT, 0, RETRY) is JobState.FAILED
    assert next_state(Reason.WORKER_LOST, 0, None) is JobState.FAILED


@pytest.mark.parametrize(
    "said", [Reason.CANCELLED, Reason.PREEMPTED, Reason.WORKER_LOST, Reason.NODE_FAILURE]
)
def test_the_cluster_knows_why_a_driver_was_ended_from_outside(said: Reason) -> None:
    seen = replace(EXITED, reason=Reason.OUT_OF_MEMORY, evidence="OUT_OF_MEMORY, says the cluster")
    verdict = judge(ATTEMPT, seen, failed(said), "")
    assert verdict.reason is Reason.OUT_OF_MEMORY
    assert verdict.message == "OUT_OF_MEMORY, says the cluster. what it says"


def test_a_fault_of_its_own_is_the_drivers_to_tell() -> None:
    seen = replace(EXITED, reason=Reason.PREEMPTED)
    assert judge(ATTEMPT, seen, failed(Reason.NAN_LOSS), "").reason is Reason.NAN_LOSS


def test_the_cluster_speaks_for_a_driver_that_left_no_word() -> None:
    seen = replace(EXITED, reason=Reason.NODE_FAILURE, evidence="node n2 is down", exit_code=1)
    verdict = judge(ATTEMPT, seen, None, "the last line")
    assert verdict.reason is Reason.NODE_FAILURE
    assert verdict.message.startswith("node n2 is down; the driver exited with code 1")
    assert verdict.message.endswith("the last line")


def test_the_service_knows_better_than_the_cluster_why_it_stopped_an_attempt() -> None:
    seen = replace(EXITED, reason=Reason.PREEMPTED)
    assert judge(STOPPED_BY_USER, seen, None, "").reason is Reason.CANCELLED


@pytest.mark.parametrize(
    ("seen_reason", "reason"),
    [(Reason.PREEMPTED, Reason.PREEMPTED), (Reason.NODE_FAILURE, Reason.TIMEOUT),
     (Reason.TIMEOUT, Reason.TIMEOUT), (None, Reason.TIMEOUT)],
)  # fmt: skip
def test_a_driver_may_take_a_preemption_for_its_time_limit(
    seen_reason: Reason | None, reason: Reason
) -> None:
    """SLURM can be set to announce both by the same signal."""
    seen = replace(EXITED, reason=seen_reason)
    assert judge(ATTEMPT, seen, failed(Reason.TIMEOUT), "").reason is reason
