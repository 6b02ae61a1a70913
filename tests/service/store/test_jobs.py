from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import update

from service.jobs import Job, JobState, Wish
from service.store import BadCursor, Idempotency, IdempotencyConflict, NotFound, Store, tables
from tests.service.store.running_jobs import claim, new_job
from tests.service.store.sample_jobs import context, document


def test_a_job_is_kept_with_its_document_as_it_was_sent(store: Store) -> None:
    spec = document("first", training={"epochs": 2})
    resolved = context(spec)
    job, created = store.jobs.create(resolved, spec, created_by="key-a")
    assert created
    assert store.jobs.get(job.id) == job
    assert job.spec == spec
    assert job.context() == resolved
    assert (job.state, job.wish, job.created_by) == (JobState.PENDING, Wish.RUN, "key-a")


def test_an_unknown_job_is_not_found(store: Store) -> None:
    for call in (store.jobs.get, store.jobs.find, store.jobs.cancel):
        with pytest.raises(NotFound, match="job-nowhere"):
            call("job-nowhere")


def test_a_name_means_the_newest_job_of_that_name(store: Store) -> None:
    first, second = new_job(store, "twice"), new_job(store, "twice")
    assert store.jobs.find("twice").id == second.id
    assert store.jobs.find(first.id).id == first.id


def test_the_same_idempotency_key_gives_the_same_job(store: Store) -> None:
    spec = document()
    once = Idempotency(scope="key-a", key="k")
    assert store.jobs.replay(once, spec) is None
    job, created = store.jobs.create(context(spec), spec, idempotency=once)
    again, created_again = store.jobs.create(
        context(spec), dict(reversed(spec.items())), idempotency=once
    )
    assert (created, created_again) == (True, False)
    assert again.id == job.id
    assert store.jobs.replay(once, spec) == job
    other, _ = store.jobs.create(
        context(spec), spec, idempotency=Idempotency(scope="key-b", key="k")
    )
    assert other.id != job.id


def test_an_idempotency_key_with_another_body_is_a_conflict(store: Store) -> None:
    spec, changed = document("one"), document("two")
    once = Idempotency(scope="key-a", key="k")
    job, _ = store.jobs.create(context(spec), spec, idempotency=once)
    with pytest.raises(IdempotencyConflict, match=job.id):
        store.jobs.create(context(changed), changed, idempotency=once)
    with pytest.raises(IdempotencyConflict, match=job.id):
        store.jobs.replay(once, changed)
    assert sum(store.jobs.counts().values()) == 1


def test_g15_submits_at_the_same_instant_make_one_job(store: Store) -> None:
    spec = document()
    once = Idempotency(scope="key-a", key="k")

    def submit(_: int) -> tuple[Job, bool]:
        return store.jobs.create(context(spec), spec, idempotency=once)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(submit, range(8)))
    assert len({job.id for job, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1
    assert len(store.jobs.active()) == 1


def test_g15_the_same_job_id_twice_leaves_the_first_untouched(store: Store) -> None:
    spec = document()
    resolved = context(spec)
    job, _ = store.jobs.create(resolved, spec)
    store.jobs.cancel(job.id)
    before = store.jobs.get(job.id)
    assert store.jobs.create(resolved, spec) == (before, False)
    changed = document("other")
    with pytest.raises(IdempotencyConflict, match=job.id):
        store.jobs.create(context(changed, job.id), changed)
    assert store.jobs.get(job.id) == before


def test_g27_pages_hold_each_job_once_while_others_arrive(store: Store) -> None:
    jobs = [new_job(store) for _ in range(9)]
    with store.database.writing() as connection:
        # Equal times: the id must decide.
        connection.execute(update(tables.jobs).values(created_at=1000.5))
    seen: list[str] = []
    after = None
    while True:
        page = store.jobs.page(limit=4, after=after)
        seen += [job.id for job in page.items]
        after = page.cursor
        if not page.has_more:
            break
        new_job(store, "later")
    assert seen == sorted((job.id for job in jobs), reverse=True)


def test_a_page_can_be_cut_to_a_name_and_to_states(store: Store) -> None:
    first, _second = new_job(store, "one"), new_job(store, "two")
    assert [job.id for job in store.jobs.page(limit=9, name="one").items] == [first.id]
    assert store.jobs.page(limit=9, states=[JobState.FAILED]).items == []
    assert store.jobs.page(limit=9, states=[JobState.FAILED]).cursor is None


@pytest.mark.parametrize("cursor", ["", "x", "bm9wZQ==", "WzFd", "WyJhIiwgMV0=", "\ud800"])
def test_a_cursor_that_the_service_did_not_make_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(BadCursor):
        store.jobs.page(limit=1, after=cursor)


def test_cancelling_twice_changes_nothing_the_second_time(store: Store) -> None:
    job = new_job(store)
    cancelled = store.jobs.cancel(job.id)
    assert cancelled.wish is Wish.CANCEL
    assert cancelled.state is JobState.PENDING
    assert store.jobs.cancel(job.id) == cancelled


def test_counts_name_every_state(store: Store) -> None:
    new_job(store)
    counts = store.jobs.counts()
    assert set(counts) == set(JobState)
    assert counts[JobState.PENDING] == 1
    assert sum(counts.values()) == 1


def test_a_subscriber_hears_of_each_change_until_it_leaves(store: Store) -> None:
    heard: list[str] = []
    wishes: list[str] = []
    leave = store.changes.subscribe(heard.append)
    store.wishes.subscribe(wishes.append)
    job = new_job(store)
    store.jobs.queue(claim(store, job))
    store.jobs.cancel(job.id)
    leave()
    store.jobs.cancel(job.id)
    assert heard == [job.id] * 3
    assert wishes == [job.id] * 3  # the move was no wish; the second cancellation was
