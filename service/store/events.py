"""Events: taken in from workers exactly once, read by number.

A worker numbers its events 1, 2, 3, ... within an attempt (`seq`) and sends again whatever was not
acknowledged, so a batch may repeat what is known or, after a lost one, skip ahead. What is known is
skipped; from a gap on nothing is taken, and the answer names the newest `seq` held, from which the
worker goes on.
"""

import math
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select, update

from service.auth.keys import hash_secret
from service.jobs.records import Event, Job, MetricPoint
from service.jobs.states import AttemptState
from service.spec import WorkerEvent
from service.store import tables
from service.store.attempts import find_attempt, mark_alive
from service.store.changes import Changes
from service.store.claims import Claim, locked_by
from service.store.database import Database
from service.store.errors import StaleAttempt, WrongToken
from service.store.locked import LockedJob

_table = tables.events


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """The answer to a batch."""

    last_seq: int
    """Newest event of the attempt that the service holds; the worker goes on after it."""
    stored: int
    """How many of the batch were new."""


Stored = Callable[[Job, Sequence[WorkerEvent]], None]
"""Told which events of a job were new; it must return at once and not raise."""


class Events:
    """The logs of all jobs."""

    def __init__(self, database: Database, changes: Changes) -> None:
        self._database = database
        self._changes = changes
        self._listeners: list[Stored] = []

    def on_stored(self, listener: Stored) -> None:
        """Calls `listener` after each commit of a worker's events, in the thread that made it.

        Each event is told once, in the one process that stored it.
        """
        self._listeners.append(listener)

    def ingest(
        self, job_id: str, attempt: int, token: str, events: Sequence[WorkerEvent]
    ) -> Ingested:
        """Takes in a worker's batch. The first event makes a STARTING job RUNNING.

        A number that is NaN or infinite, which JSON does not have, is stored as null.

        Raises:
            NotFound: there is no such attempt.
            WrongToken: the token is not this attempt's.
            StaleAttempt: the attempt is over, or a newer one was started.
        """
        with self._database.writing() as connection:
            locked = LockedJob(connection, job_id)
            known = find_attempt(connection, job_id, attempt)
            if not secrets.compare_digest(hash_secret(token), known.token_hash):
                raise WrongToken(job_id, attempt)
            newest = locked.job.attempt_count
            if attempt < newest or known.state is AttemptState.ENDED:
                raise StaleAttempt(job_id, attempt, newest)
            answer = _append(connection, locked, attempt, events)
        self._tell(locked.job, answer, events)
        return answer

    def drain(self, claim: Claim, attempt: int, events: Sequence[WorkerEvent]) -> Ingested:
        """Takes in what an attempt left in its spool; the reconciler's claim stands for the token.

        Raises:
            ClaimLost: another reconciler holds the job.
        """
        with self._database.writing() as connection:
            locked = locked_by(connection, claim)
            answer = _append(connection, locked, attempt, events)
        self._tell(locked.job, answer, events)
        return answer

    def _tell(self, job: Job, answer: Ingested, events: Sequence[WorkerEvent]) -> None:
        if not answer.stored:
            return
        self._changes.ring(job.id)
        first = answer.last_seq - answer.stored + 1
        new = [event for event in events if first <= event.seq <= answer.last_seq]
        for listener in self._listeners:
            listener(job, new)

    def after(
        self, job_id: str, number: int, *, limit: int, kinds: Collection[str] | None = None
    ) -> list[Event]:
        """Events of a job with a number greater than `number`, oldest first, `limit` at most.

        An unknown job has none.
        """
        query = select(_table).where(_table.c.job_id == job_id, _table.c.number > number)
        if kinds is not None:
            query = query.where(_table.c.kind.in_(kinds))
        query = query.order_by(_table.c.number).limit(limit)
        with self._database.reading() as connection:
            return [Event(**row) for row in connection.execute(query).mappings()]

    def metrics_of(
        self, job_id: str, *, after_step: int = -1, limit: int = 1_000_000
    ) -> list[MetricPoint]:
        """The metrics of each step after `after_step`, by step, `limit` steps at most.

        Where an attempt went over a step again, only the newest attempt's values count. Several
        `metrics` events of one step in one attempt become one point.
        """
        points: list[MetricPoint] = []
        with self._database.reading() as connection:
            for row in _metrics_by_step(connection, job_id, after_step):
                values = {
                    name: value
                    for name, value in row["data"].items()
                    if isinstance(value, int | float)
                }
                last = points[-1] if points and points[-1].step == row["step"] else None
                if last is None and len(points) == limit:
                    break
                if last is not None:
                    points.pop()
                    if last.attempt == row["attempt"]:
                        values = {**last.values, **values}
                points.append(
                    MetricPoint(
                        step=row["step"], attempt=row["attempt"], time=row["time"], values=values
                    )
                )
        return points

    def newest_checkpoints(self, job_id: str) -> dict[int, int]:
        """The highest step that each attempt announced a checkpoint of, by attempt."""
        columns = _table.c
        query = (
            select(columns.attempt, func.max(columns.step))
            .where(columns.job_id == job_id, columns.kind == "checkpoint")
            .group_by(columns.attempt)
        )
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}


def _append(
    connection: Connection, locked: LockedJob, attempt: int, events: Sequence[WorkerEvent]
) -> Ingested:
    last = find_attempt(connection, locked.job.id, attempt).last_seq
    rows: list[dict[str, Any]] = []
    for event in events:
        if event.seq == last + 1:
            last = event.seq
            rows.append(
                {
                    "time": event.time,
                    "attempt": attempt,
                    "seq": event.seq,
                    "kind": event.kind,
                    "step": event.step,
                    "data": _finite(event.data),
                }
            )
        elif event.seq > last:
            break
    if rows:
        mark_alive(connection, locked, attempt)
        locked.append(rows)
        connection.execute(
            update(tables.attempts)
            .where(tables.attempts.c.job_id == locked.job.id, tables.attempts.c.number == attempt)
            .values(last_seq=last)
        )
    return Ingested(last_seq=last, stored=len(rows))


def _metrics_by_step(connection: Connection, job_id: str, after_step: int) -> Sequence[RowMapping]:
    query = (
        select(_table.c.step, _table.c.attempt, _table.c.time, _table.c.data)
        .where(_table.c.job_id == job_id, _table.c.kind == "metrics", _table.c.step > after_step)
        .order_by(_table.c.step, _table.c.attempt, _table.c.number)
    )
    return connection.execute(query).mappings().all()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
