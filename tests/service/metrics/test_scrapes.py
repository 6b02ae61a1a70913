"""What a scrape shows of the store, and what it costs."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, insert

from service.jobs import JobState
from service.metrics import ServiceMetrics
from service.metrics.live_jobs import LOOK_BACK, MOST_JOBS
from service.spec import Reason, WorkerEvent
from service.store import Store, tables
from service.store.attempts import AttemptEnd
from tests.service.store.running_jobs import claim, new_job, open_attempt, starting_job
from tests.service.store.sample_jobs import context, document

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/planish.db")
    yield opened
    opened.close()


def opened(store: Store) -> ServiceMetrics:
    metrics = ServiceMetrics()
    metrics.open(store, dict.fromkeys(["local"]), lambda: 0.0)  # type: ignore[arg-type]
    return metrics


def scrape(metrics: ServiceMetrics) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def of(samples: Samples, metric: str, **labels: str) -> list[float]:
    """Values of the series with these labels, and perhaps more."""
    wanted = frozenset(labels.items())
    return [value for (found, have), value in samples.items() if found == metric and wanted <= have]


def step(seq: int, step: int, **data: object) -> WorkerEvent:
    return WorkerEvent(seq=seq, time=100.0 + seq, kind="metrics", step=step, data=data)


def test_a_running_job_shows_its_newest_step(store: Store) -> None:
    job, _ = starting_job(store, token="secret")
    metrics = opened(store)
    assert of(scrape(metrics), "planish_job_info", job_id=job.id, state="STARTING") == [1]
    batch = [step(1, 1, loss=2.0, tokens=10), step(2, 2, loss=1.5, tokens=20)]
    store.events.ingest(job.id, 1, "secret", batch)
    found = scrape(metrics)
    here = {"job_id": job.id, "algorithm": "sft", "cluster": "local"}
    assert of(found, "planish_job_info", name="sample", state="RUNNING", **here) == [1]
    assert of(found, "planish_job_loss", **here) == [1.5]
    assert of(found, "planish_job_step", **here) == [2]
    store.events.ingest(job.id, 1, "secret", [step(3, 3, loss=1.25)])
    assert of(scrape(metrics), "planish_job_loss", **here) == [1.25]


def test_every_replica_shows_it_and_one_counts_it(store: Store, tmp_path: Path) -> None:
    """The driver talks to one of them; a batch that it sends twice is counted once."""
    other = Store.open(f"sqlite:///{tmp_path}/planish.db")
    replicas = opened(store), opened(other)
    job, _ = starting_job(store, token="secret")
    batch = [step(1, 1, loss=2.0, tokens=10, seconds_update=3.0)]
    store.events.ingest(job.id, 1, "secret", batch)
    other.events.ingest(job.id, 1, "secret", [*batch, step(2, 2, loss=1.0, tokens=5)])
    found = [scrape(replica) for replica in replicas]
    assert [of(one, "planish_job_loss", job_id=job.id) for one in found] == [[1.0], [1.0]]
    for name, total in (
        ("planish_training_steps_total", 2),
        ("planish_training_tokens_total", 15),
        ("planish_step_phase_seconds_count", 1),
    ):
        assert sum(sum(of(one, name)) for one in found) == total
    other.close()


def test_what_the_reconciler_reads_from_a_spool_counts_too(store: Store) -> None:
    _, held = starting_job(store)
    metrics = opened(store)
    missed = WorkerEvent(seq=2, time=1.0, kind="warning", data={"message": "", "missed": 1})
    store.events.drain(held, 1, [step(1, 1, left_out=1), missed])
    found = scrape(metrics)
    assert of(found, "planish_training_steps_left_out_total", algorithm="sft") == [1]
    assert of(found, "planish_training_steps_total", algorithm="sft") == [0]
    assert of(found, "planish_checkpoints_missed_total", algorithm="sft") == [1]


def test_episodes_count_by_their_environment(store: Store) -> None:
    spec = document(
        algorithm={"type": "grpo"},
        environment={"id": "tools/calculator"},
        training={"steps": 5},
        data=None,
    )
    job = store.jobs.create(context(spec), spec)[0]
    held = claim(store, job)
    store.jobs.queue(held)
    open_attempt(store, held, "secret")
    metrics = opened(store)
    played = step(1, 1, episodes=16, episodes_failed=2, episodes_unscored=1)
    store.events.ingest(job.id, 1, "secret", [played])
    found = scrape(metrics)
    where = {"environment": "tools/calculator"}
    assert of(found, "planish_episodes_total", **where) == [16]
    assert of(found, "planish_episodes_failed_total", **where) == [2]
    assert of(found, "planish_episodes_unscored_total", **where) == [1]


def test_a_service_that_starts_anew_finds_what_its_jobs_said(store: Store) -> None:
    job, _ = starting_job(store, token="secret")
    first = [step(seq, seq, loss=float(seq)) for seq in range(1, LOOK_BACK + 100)]
    store.events.ingest(job.id, 1, "secret", first)
    assert of(scrape(opened(store)), "planish_job_loss", job_id=job.id) == [LOOK_BACK + 99]


def test_h01_series_end_with_their_job(store: Store) -> None:
    job, held = starting_job(store, token="secret")
    metrics = opened(store)
    before = {name for name, labels in scrape(metrics) if ("job_id", job.id) in labels}
    assert before == {"planish_job_info"}
    store.events.ingest(job.id, 1, "secret", [step(1, 1, loss=2.0)])
    assert job.id in metrics.render().decode()
    failed = AttemptEnd(next_state=JobState.FAILED, reason=Reason.NAN_LOSS)
    store.attempts.end(held, 1, failed)
    assert job.id not in metrics.render().decode()
    assert of(scrape(metrics), "planish_jobs_failed_total", reason="NAN_LOSS") == [1]


def test_time_in_the_queue_and_on_the_way_is_told(store: Store) -> None:
    new_job(store)
    starting_job(store)
    time.sleep(0.05)
    found = scrape(opened(store))
    assert 0.05 <= of(found, "planish_queue_oldest_seconds")[0] < 30
    assert 0.05 <= of(found, "planish_starting_oldest_seconds")[0] < 30


def fill(store: Store, ended: int, running: int) -> None:
    """Jobs as they are after months, each with a spec of the usual size."""
    spec = document()
    resolved = context(spec).model_dump(mode="json") | {"padding": "x" * 2000}
    shared = {
        "name": "sample",
        "cluster": "local",
        "spec": spec,
        "resolved": resolved,
        "wish": "run",
        "message": "",
        "created_at": 1.0,
        "updated_at": 1.0,
        "event_count": 0,
        "attempt_count": 1,
    }
    attempt = {
        "number": 1,
        "launcher": "local",
        "launcher_id": "x",
        "created_at": 1.0,
        "message": "traceback" * 20,
        "last_seq": 0,
        "token_hash": "",
    }
    jobs, attempts = [], []
    for number in range(ended + running):
        over = number < ended
        reason = Reason.NODE_FAILURE if over else None
        state = JobState.FAILED if over else JobState.RUNNING
        jobs.append({**shared, "id": f"job-{number}", "state": state, "reason": reason})
        ends = {"state": "ENDED" if over else "RUNNING", "reason": reason}
        attempts.append({**attempt, "job_id": f"job-{number}", **ends})
    with store.database.writing() as connection:
        connection.execute(insert(tables.jobs), jobs)
        connection.execute(insert(tables.attempts), attempts)


def test_a_scrape_of_ten_thousand_jobs_is_cheap(store: Store) -> None:
    """Few queries, none of which reads the rows of jobs that have ended."""
    fill(store, ended=10_000, running=50)
    metrics = opened(store)
    metrics.render()
    asked: list[tuple[str, object]] = []
    event.listen(
        store.database.engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, values, *_: asked.append((statement, values)),
    )
    seconds = []
    for _ in range(5):
        started = time.thread_time()  # others may use this machine meanwhile
        metrics.render()
        seconds.append(time.thread_time() - started)
    selects = [(statement, values) for statement, values in asked if "SELECT" in statement]
    assert len(selects) == 5 * 4
    with store.database.reading() as connection:
        for statement, values in selects[:4]:
            plan = connection.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, values).fetchall()
            steps = [row[3] for row in plan]
            assert all("INDEX" in step for step in steps if step.startswith(("SCAN", "SEARCH")))
    assert min(seconds) < 0.05


def test_a_flood_of_running_jobs_is_cut_and_said(store: Store) -> None:
    fill(store, ended=0, running=MOST_JOBS + 3)
    found = scrape(opened(store))
    assert len(of(found, "planish_job_info")) == MOST_JOBS
    assert of(found, "planish_jobs_unshown") == [3]
    assert of(found, "planish_jobs", state="RUNNING") == [MOST_JOBS + 3]
