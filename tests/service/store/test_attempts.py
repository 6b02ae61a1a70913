import pytest

from service.jobs import AttemptState, IllegalMove, JobState
from service.spec import Reason
from service.store import NotFound, Store
from service.store.attempts import AttemptEnd
from tests.service.store.running_jobs import claim, new_job, open_attempt, starting_job


def test_an_attempt_runs_from_its_first_sign_of_life_to_its_end(store: Store) -> None:
    job, held = starting_job(store)
    store.attempts.alive(held, 1)
    started = store.attempts.get(job.id, 1)
    assert started.state is AttemptState.RUNNING
    assert started.started_at is not None
    store.attempts.alive(held, 1)
    assert store.attempts.get(job.id, 1) == started
    store.attempts.end(held, 1, AttemptEnd(next_state=JobState.SUCCEEDED, reason=None, exit_code=0))
    ended = store.attempts.get(job.id, 1)
    assert (ended.state, ended.exit_code, ended.reason) == (AttemptState.ENDED, 0, None)
    assert store.jobs.get(job.id).state is JobState.SUCCEEDED


def test_an_attempt_that_nobody_saw_alive_can_have_ended_well(store: Store) -> None:
    job, held = starting_job(store)
    store.attempts.end(held, 1, AttemptEnd(next_state=JobState.SUCCEEDED, reason=None))
    moves = [event.data["to"] for event in store.events.after(job.id, 0, limit=10)]
    assert moves == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]


def test_g17_a_job_that_has_ended_can_not_end_again(store: Store) -> None:
    job, held = starting_job(store)
    store.attempts.end(held, 1, AttemptEnd(next_state=JobState.SUCCEEDED, reason=None))
    again = claim(store, job)
    before = store.jobs.get(job.id), store.attempts.of_job(job.id)
    with pytest.raises(IllegalMove, match="terminal"):
        store.attempts.end(
            again, 1, AttemptEnd(next_state=JobState.FAILED, reason=Reason.WORKER_LOST)
        )
    with pytest.raises(IllegalMove, match="terminal"):
        open_attempt(store, again, "again")
    assert store.jobs.cancel(job.id) == before[0]
    assert (store.jobs.get(job.id), store.attempts.of_job(job.id)) == before


def test_the_first_reason_for_stopping_stays(store: Store) -> None:
    job, held = starting_job(store)
    store.attempts.stopping(held, 1, Reason.TIMEOUT, "too slow")
    before = store.attempts.get(job.id, 1)
    store.attempts.stopping(held, 1, Reason.CANCELLED, "unwanted")
    assert store.attempts.get(job.id, 1) == before
    assert (before.stop_reason, before.message) == (Reason.TIMEOUT, "too slow")
    assert store.jobs.get(job.id).state is JobState.STARTING


def test_stopping_for_a_user_makes_the_job_cancelling(store: Store) -> None:
    job, held = starting_job(store)
    store.attempts.stopping(held, 1, Reason.CANCELLED, "unwanted")
    assert store.jobs.get(job.id).state is JobState.CANCELLING
    store.attempts.alive(held, 1)
    assert store.jobs.get(job.id).state is JobState.CANCELLING


def test_places_go_to_queued_jobs_in_their_order(store: Store) -> None:
    jobs = [new_job(store) for _ in range(3)]
    claims = [claim(store, job) for job in jobs]
    for held in claims:
        store.jobs.queue(held)

    def may_open() -> list[bool]:
        return [store.attempts.may_open(job.id, capacity=1) for job in jobs]

    def opened(place: int) -> bool:
        found = store.attempts.open(claims[place], launcher="local", launcher_id="x", capacity=1)
        return found is not None

    assert may_open() == [True, False, False]
    assert [opened(2), opened(0), opened(1)] == [False, True, False]
    assert may_open() == [False, False, False]
    recovering = AttemptEnd(next_state=JobState.RECOVERING, reason=Reason.WORKER_LOST)
    store.attempts.end(claims[0], 1, recovering)
    assert may_open() == [False, False, False]  # it keeps its place for the next attempt
    assert opened(0)
    store.attempts.end(claims[0], 2, AttemptEnd(next_state=JobState.SUCCEEDED, reason=None))
    assert may_open()[1:] == [True, False]
    assert store.attempts.may_open(jobs[2].id, capacity=None)


def test_an_unknown_attempt_is_not_found(store: Store) -> None:
    job = new_job(store)
    assert store.attempts.of_job(job.id) == []
    with pytest.raises(NotFound, match=f"{job.id}/1"):
        store.attempts.get(job.id, 1)


def test_bad_ends_are_counted_by_their_reason(store: Store) -> None:
    assert store.census.failed_attempts() == {}
    for reason in (Reason.NAN_LOSS, None, Reason.NAN_LOSS, Reason.TIMEOUT):
        _, held = starting_job(store)
        state = JobState.FAILED if reason else JobState.SUCCEEDED
        store.attempts.end(held, 1, AttemptEnd(next_state=state, reason=reason))
    assert store.census.failed_attempts() == {
        ("local", Reason.NAN_LOSS): 2,
        ("local", Reason.TIMEOUT): 1,
    }
