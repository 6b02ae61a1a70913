from dataclasses import replace

import pytest

from service.jobs import Attempt, AttemptState, Job, JobState, Wish
from service.launchers import Observation, Phase
from service.reconciler.decisions import (
    Action,
    AskToEnd,
    EndUnstarted,
    Finish,
    Look,
    MarkAlive,
    Open,
    Queue,
    Stop,
    Submit,
    Wait,
    decide,
)
from service.spec import JobContext, Reason
from tests.service.store.sample_jobs import context, document

NOW = 10_000.0
CONTEXT = context(document(resources={"time_limit_minutes": 10}))
UNSTARTED = (JobState.PENDING, JobState.QUEUED, JobState.RECOVERING, JobState.PAUSED)
LIVE = (JobState.STARTING, JobState.RUNNING, JobState.PAUSING)


def job(state: JobState, *, wish: Wish = Wish.RUN, retry_at: float | None = None) -> Job:
    return Job(
        id=CONTEXT.job_id,
        name="sample",
        cluster="local",
        spec={},
        resolved={},
        wish=wish,
        state=state,
        reason=None,
        message="",
        created_at=1.0,
        updated_at=1.0,
        retry_at=retry_at,
        event_count=0,
        attempt_count=1,
        created_by=None,
    )


ATTEMPT = Attempt(
    job_id=CONTEXT.job_id,
    number=1,
    launcher="local",
    launcher_id="x",
    state=AttemptState.RUNNING,
    created_at=NOW - 100,
    started_at=NOW - 90,
    ended_at=None,
    exit_code=None,
    exit_signal=None,
    reason=None,
    message="",
    stop_reason=None,
    stop_asked_at=None,
    last_seq=0,
    token_hash="",
)
STOPPED = replace(ATTEMPT, stop_reason=Reason.CANCELLED, stop_asked_at=NOW - 5)


def look(
    state: JobState,
    phase: Phase | None = None,
    *,
    attempt: Attempt = ATTEMPT,
    wish: Wish = Wish.RUN,
    readable: JobContext | None = CONTEXT,
    has_launcher: bool = True,
    leftovers: int = 0,
    outcome_at: float | None = None,
    retry_at: float | None = None,
) -> Action:
    return decide(
        Look(
            job=job(state, wish=wish, retry_at=retry_at),
            context=readable,
            has_launcher=has_launcher,
            attempt=None if phase is None else attempt,
            seen=None if phase is None else Observation(phase=phase, leftovers=leftovers),
            outcome_at=outcome_at,
            now=NOW,
            grace_seconds=20.0,
        )
    )


def test_a_new_job_is_queued_and_then_opened() -> None:
    assert look(JobState.PENDING) == Queue()
    assert look(JobState.QUEUED) == Open()
    assert look(JobState.PAUSED) == Wait()


def test_a_retry_waits_for_its_time() -> None:
    assert look(JobState.RECOVERING, retry_at=NOW + 1) == Wait()
    assert look(JobState.RECOVERING, retry_at=NOW) == Open()


@pytest.mark.parametrize("state", UNSTARTED)
def test_what_has_no_process_is_cancelled_at_once(state: JobState) -> None:
    action = look(state, wish=Wish.CANCEL, retry_at=NOW + 1)
    assert isinstance(action, EndUnstarted)
    assert (action.state, action.reason) == (JobState.CANCELLED, Reason.CANCELLED)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.QUEUED, JobState.RECOVERING])
def test_a_job_that_can_not_be_launched_fails_with_the_cause(state: JobState) -> None:
    action = look(state, has_launcher=False)
    assert isinstance(action, EndUnstarted)
    assert (action.state, action.reason) == (JobState.FAILED, Reason.LAUNCH_FAILED)
    assert "resources.cluster" in action.message
    action = look(state, readable=None)
    assert isinstance(action, EndUnstarted)
    assert "cannot read" in action.message


def test_an_attempt_is_submitted_seen_alive_and_left_alone() -> None:
    assert look(JobState.STARTING, Phase.UNKNOWN) == Submit(ATTEMPT, CONTEXT)
    assert look(JobState.STARTING, Phase.QUEUED) == Wait()
    assert look(JobState.STARTING, Phase.RUNNING) == MarkAlive(ATTEMPT)
    assert look(JobState.RUNNING, Phase.RUNNING) == Wait()
    assert look(JobState.RUNNING, Phase.RUNNING, readable=context(document())) == Wait()


def test_an_attempt_whose_record_is_lost_is_ended_and_not_started_again() -> None:
    assert look(JobState.RUNNING, Phase.UNKNOWN) == AskToEnd(ATTEMPT, 0.0)


@pytest.mark.parametrize("state", [*LIVE, JobState.CANCELLING])
def test_an_attempt_is_finished_when_nothing_of_it_is_left(state: JobState) -> None:
    assert look(state, Phase.EXITED, leftovers=2) == AskToEnd(ATTEMPT, 0.0)
    finish = Finish(ATTEMPT, Observation(phase=Phase.EXITED), CONTEXT)
    assert look(state, Phase.EXITED, wish=Wish.CANCEL) == finish


@pytest.mark.parametrize("state", LIVE)
def test_a_live_attempt_is_stopped_for_a_user(state: JobState) -> None:
    action = look(state, Phase.RUNNING, wish=Wish.CANCEL)
    assert isinstance(action, Stop)
    assert action.reason is Reason.CANCELLED


def test_an_attempt_is_stopped_when_its_time_is_over() -> None:
    late = replace(ATTEMPT, started_at=NOW - 600)
    action = look(JobState.RUNNING, Phase.RUNNING, attempt=late)
    assert isinstance(action, Stop)
    assert action.reason is Reason.TIMEOUT
    assert "time_limit_minutes" in action.message
    early = replace(ATTEMPT, started_at=NOW - 599)
    assert look(JobState.RUNNING, Phase.RUNNING, attempt=early) == Wait()
    queued = replace(ATTEMPT, started_at=None)
    assert look(JobState.STARTING, Phase.QUEUED, attempt=queued) == Wait()


def test_a_live_job_that_can_not_be_read_is_stopped() -> None:
    action = look(JobState.RUNNING, Phase.RUNNING, readable=None)
    assert isinstance(action, Stop)
    assert action.reason is Reason.LAUNCH_FAILED


def test_a_stopped_attempt_gets_what_is_left_of_its_grace() -> None:
    assert look(JobState.CANCELLING, Phase.RUNNING, attempt=STOPPED) == AskToEnd(STOPPED, 15.0)
    over = replace(STOPPED, stop_asked_at=NOW - 21)
    assert look(JobState.CANCELLING, Phase.RUNNING, attempt=over) == AskToEnd(over, 0.0)


def test_one_that_is_not_cancelled_gets_time_to_save() -> None:
    late = replace(STOPPED, stop_reason=Reason.TIMEOUT)
    extra = CONTEXT.spec.faults.grace_seconds
    assert look(JobState.RUNNING, Phase.RUNNING, attempt=late) == AskToEnd(late, 15.0 + extra)


def test_a_driver_that_hangs_after_its_outcome_is_ended() -> None:
    assert look(JobState.RUNNING, Phase.RUNNING, outcome_at=NOW - 19) == Wait()
    assert look(JobState.RUNNING, Phase.RUNNING, outcome_at=NOW - 21) == AskToEnd(ATTEMPT, 0.0)


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_g17_nothing_is_done_for_a_job_that_has_ended(state: JobState) -> None:
    assert look(state, wish=Wish.CANCEL) == Wait()


def test_a_live_job_without_its_launcher_waits_for_it() -> None:
    assert look(JobState.RUNNING, None, has_launcher=False) == Wait()
