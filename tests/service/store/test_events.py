import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.jobs import JobState
from service.spec import Reason, WorkerEvent
from service.store import Ingested, NotFound, StaleAttempt, Store, WrongToken
from service.store.attempts import AttemptEnd
from tests.service.store.running_jobs import open_attempt, starting_job


def progress(seq: int, **data: Any) -> WorkerEvent:
    return WorkerEvent(seq=seq, time=float(seq), kind="progress", step=seq, data=data)


def metrics(seq: int, step: int, **values: float) -> WorkerEvent:
    return WorkerEvent(seq=seq, time=float(seq), kind="metrics", step=step, data=values)


def worker_seqs(store: Store, job_id: str, attempt: int) -> list[int | None]:
    log = store.events.after(job_id, 0, limit=10_000)
    assert [event.number for event in log] == list(range(1, len(log) + 1))
    return [event.seq for event in log if event.attempt == attempt and event.seq is not None]


def test_the_first_event_makes_the_job_run(store: Store) -> None:
    job, _ = starting_job(store, "secret")
    started = WorkerEvent(seq=1, time=5.0, kind="started", data={"world_size": 2})
    assert store.events.ingest(job.id, 1, "secret", [started]) == Ingested(last_seq=1, stored=1)
    assert store.jobs.get(job.id).state is JobState.RUNNING
    *_, running, event = store.events.after(job.id, 0, limit=10)
    assert running.data["to"] == "RUNNING"
    assert (event.kind, event.attempt, event.seq, event.time) == ("started", 1, 1, 5.0)
    assert event.data == {"world_size": 2}


def test_known_events_are_skipped_and_none_is_taken_beyond_a_gap(store: Store) -> None:
    job, _ = starting_job(store, "t")

    def push(*seqs: int) -> Ingested:
        return store.events.ingest(job.id, 1, "t", [progress(seq) for seq in seqs])

    assert push(2, 3) == Ingested(last_seq=0, stored=0)
    assert store.jobs.get(job.id).state is JobState.STARTING
    assert push(1, 2) == Ingested(last_seq=2, stored=2)
    assert push(1, 2, 3) == Ingested(last_seq=3, stored=1)
    assert push(4, 6) == Ingested(last_seq=4, stored=1)
    assert push(2) == Ingested(last_seq=4, stored=0)
    assert worker_seqs(store, job.id, 1) == [1, 2, 3, 4]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    count=st.integers(1, 30),
    flaps=st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 9)), max_size=20),
)
def test_a_flapping_pusher_leaves_each_event_once_and_in_order(
    store: Store, count: int, flaps: list[tuple[bool, int, int]]
) -> None:
    job, _ = starting_job(store, "t")
    events = [progress(seq) for seq in range(1, count + 1)]
    acknowledged = 0
    for answered, jump, size in flaps:
        # It starts anywhere: after a lost answer too early, after a lost spool too late.
        begin = min(jump, count - 1)
        answer = store.events.ingest(job.id, 1, "t", events[begin : begin + size])
        if answered:
            acknowledged = answer.last_seq
    while acknowledged < count:
        acknowledged = store.events.ingest(job.id, 1, "t", events[acknowledged:]).last_seq
    assert worker_seqs(store, job.id, 1) == list(range(1, count + 1))


def test_writers_in_parallel_leave_no_gap_and_no_double(store: Store) -> None:
    job, held = starting_job(store, "t")

    def push(begin: int) -> None:
        for first in range(begin, 40, 3):
            store.events.ingest(job.id, 1, "t", [progress(s) for s in range(1, first + 2)])

    def move(_: int) -> None:
        for _ in range(10):
            store.attempts.stopping(held, 1, Reason.CANCELLED, "")
            store.jobs.cancel(job.id)

    with ThreadPoolExecutor(4) as threads:
        done = [*(threads.submit(push, begin) for begin in range(3)), threads.submit(move, 0)]
        for future in done:
            future.result()
    assert worker_seqs(store, job.id, 1) == list(range(1, 41))


def test_a_wrong_token_writes_nothing(store: Store) -> None:
    job, held = starting_job(store, "right")
    for token in ("wrong", "", "right\n"):
        with pytest.raises(WrongToken, match=job.id):
            store.events.ingest(job.id, 1, token, [progress(1)])
    with pytest.raises(NotFound):
        store.events.ingest(job.id, 2, "right", [progress(1)])
    with pytest.raises(NotFound):
        store.events.ingest("job-nowhere", 1, "right", [progress(1)])
    assert worker_seqs(store, job.id, 1) == []
    # An attempt whose token was not made yet is opened by none, not by the empty one.
    store.attempts.end(
        held, 1, AttemptEnd(next_state=JobState.RECOVERING, reason=Reason.WORKER_LOST)
    )
    store.attempts.open(held, launcher="local", launcher_id="x", capacity=None)
    with pytest.raises(WrongToken):
        store.events.ingest(job.id, 2, "", [progress(1)])


def test_a_stale_attempt_is_shut_out(store: Store) -> None:
    job, held = starting_job(store, "first")
    store.events.ingest(job.id, 1, "first", [progress(1)])
    recovering = AttemptEnd(next_state=JobState.RECOVERING, reason=Reason.NODE_FAILURE)
    store.attempts.end(held, 1, recovering)
    with pytest.raises(StaleAttempt, match=r"attempt 1 .* is over"):
        store.events.ingest(job.id, 1, "first", [progress(2)])
    open_attempt(store, held, "second")
    with pytest.raises(StaleAttempt, match="attempt 2 has taken its place"):
        store.events.ingest(job.id, 1, "first", [progress(2)])
    assert store.events.ingest(job.id, 2, "second", [progress(1)]).last_seq == 1
    assert worker_seqs(store, job.id, 1) == [1]
    assert worker_seqs(store, job.id, 2) == [1]


def test_numbers_that_json_lacks_become_null(store: Store) -> None:
    job, _ = starting_job(store, "t")
    event = metrics(1, 1, loss=math.nan, norm=math.inf, rate=0.5)
    nested = progress(2, list=[1.0, {"deep": -math.inf}])
    store.events.ingest(job.id, 1, "t", [event, nested])
    first, second = store.events.after(job.id, 0, limit=10)[-2:]
    assert first.data == {"loss": None, "norm": None, "rate": 0.5}
    assert second.data == {"list": [1.0, {"deep": None}]}
    (point,) = store.events.metrics_of(job.id)
    assert point.values == {"rate": 0.5}


def test_events_can_be_read_on_from_a_number_and_by_kind(store: Store) -> None:
    job, _ = starting_job(store, "t")
    store.events.ingest(job.id, 1, "t", [progress(1), metrics(2, 1, loss=1.0), progress(3)])
    log = store.events.after(job.id, 0, limit=100)
    assert store.events.after(job.id, 2, limit=2) == log[2:4]
    only = store.events.after(job.id, 0, limit=9, kinds=["metrics"])
    assert [event.seq for event in only] == [2]
    assert store.events.after("job-nowhere", 0, limit=9) == []


def test_the_newest_attempt_wins_a_step_that_was_done_again(store: Store) -> None:
    job, held = starting_job(store, "one")
    store.events.ingest(
        job.id,
        1,
        "one",
        [
            metrics(1, 1, loss=3.0),
            metrics(2, 2, loss=2.0, norm=1.0),
            metrics(3, 3, loss=1.5),
        ],
    )
    recovering = AttemptEnd(next_state=JobState.RECOVERING, reason=Reason.WORKER_LOST)
    store.attempts.end(held, 1, recovering)
    open_attempt(store, held, "two")
    again = [metrics(1, 2, loss=2.5), metrics(2, 2, reward=0.5)]
    store.events.ingest(job.id, 2, "two", again)
    points = store.events.metrics_of(job.id)
    assert [(point.step, point.attempt, point.values) for point in points] == [
        (1, 1, {"loss": 3.0}),
        (2, 2, {"loss": 2.5, "reward": 0.5}),
        (3, 1, {"loss": 1.5}),
    ]
    assert store.events.metrics_of(job.id, after_step=1) == points[1:]
    assert store.events.metrics_of(job.id, limit=2) == points[:2]


def test_how_far_each_attempt_got(store: Store) -> None:
    job, held = starting_job(store, "first")

    def saved(seq: int, step: int) -> WorkerEvent:
        return WorkerEvent(seq=seq, time=1.0, kind="checkpoint", step=step, data={})

    assert store.events.newest_checkpoints(job.id) == {}
    store.events.ingest(job.id, 1, "first", [saved(1, 10), saved(2, 20), metrics(3, 25)])
    recovering = AttemptEnd(next_state=JobState.RECOVERING, reason=Reason.NODE_FAILURE)
    store.attempts.end(held, 1, recovering)
    open_attempt(store, held, "second")
    store.events.ingest(job.id, 2, "second", [saved(1, 20)])
    assert store.events.newest_checkpoints(job.id) == {1: 20, 2: 20}


def test_the_spool_of_an_attempt_is_taken_in_without_its_token(store: Store) -> None:
    job, held = starting_job(store, "t")
    store.events.ingest(job.id, 1, "t", [progress(1)])
    answer = store.events.drain(held, 1, [progress(1), progress(2)])
    assert answer == Ingested(last_seq=2, stored=1)
    assert store.events.drain(held, 1, [progress(2)]).stored == 0
    assert worker_seqs(store, job.id, 1) == [1, 2]
