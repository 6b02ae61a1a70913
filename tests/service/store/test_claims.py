import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.jobs import JobState
from service.spec import Reason, WorkerEvent
from service.store import Claim, ClaimLost, Store
from service.store.attempts import AttemptEnd
from tests.service.store.running_jobs import claim, new_job, starting_job


def test_one_of_many_gets_the_claim(store: Store) -> None:
    job = new_job(store)
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: store.claims.take(job.id, lease_seconds=60), range(6)))
    assert sum(answer is not None for answer in answers) == 1


def test_a_claim_can_be_given_back_and_taken_again(store: Store) -> None:
    job = new_job(store)
    first = claim(store, job)
    store.claims.release(first)
    second = claim(store, job)
    store.claims.release(first)  # not the holder any more: no effect
    assert store.claims.take(job.id, lease_seconds=60) is None
    store.jobs.queue(second)


def test_an_ended_job_is_nobodys_even_where_its_service_dies_before_it_gives_the_claim_back(
    store: Store,
) -> None:
    job = new_job(store)
    ended = store.jobs.end_without_attempt(
        claim(store, job), JobState.FAILED, Reason.USER_ERROR, "no such model"
    )
    assert (ended.lock_token, ended.lock_expires_at) == (None, None)


def test_there_is_no_claim_on_an_unknown_job(store: Store) -> None:
    assert store.claims.take("job-nowhere", lease_seconds=60) is None


def test_an_extended_claim_outlives_its_first_lease(store: Store) -> None:
    job = new_job(store)
    held = store.claims.take(job.id, lease_seconds=0.01)
    assert held is not None
    store.claims.extend(held, lease_seconds=60)
    time.sleep(0.02)
    assert store.claims.take(job.id, lease_seconds=60) is None


_GUARDED: dict[str, Callable[[Store, Claim], object]] = {
    "extend": lambda store, held: store.claims.extend(held, lease_seconds=1),
    "queue": lambda store, held: store.jobs.queue(held),
    "end_without_attempt": lambda store, held: store.jobs.end_without_attempt(
        held, JobState.FAILED, Reason.LAUNCH_FAILED, ""
    ),
    "open": lambda store, held: store.attempts.open(
        held, launcher="local", launcher_id="x", capacity=None
    ),
    "set_token": lambda store, held: store.attempts.set_token(held, 1, "0" * 64),
    "alive": lambda store, held: store.attempts.alive(held, 1),
    "stopping": lambda store, held: store.attempts.stopping(held, 1, Reason.TIMEOUT, ""),
    "end": lambda store, held: store.attempts.end(
        held, 1, AttemptEnd(next_state=JobState.FAILED, reason=Reason.WORKER_LOST)
    ),
    "drain": lambda store, held: store.events.drain(
        held, 1, [WorkerEvent(seq=1, time=0.0, kind="started")]
    ),
}


@pytest.mark.parametrize("name", _GUARDED)
def test_what_an_expired_claim_found_out_is_void(store: Store, name: str) -> None:
    job, held = starting_job(store)
    store.claims.extend(held, lease_seconds=-1)
    claim(store, job)
    before = store.jobs.get(job.id), store.attempts.of_job(job.id)
    with pytest.raises(ClaimLost, match=job.id):
        _GUARDED[name](store, held)
    assert (store.jobs.get(job.id), store.attempts.of_job(job.id)) == before
