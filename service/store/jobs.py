"""Jobs: create, look up, list, wish, and the moves of a job that has no attempt alive.

All other moves go with something that happens to an attempt, in one transaction; see `attempts`.
"""

import hashlib
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select
from sqlalchemy.exc import IntegrityError

from service.jobs.records import Job
from service.jobs.states import TERMINAL, JobState, Wish
from service.spec import JobContext, Reason
from service.store import tables
from service.store.changes import Changes
from service.store.claims import Claim, locked_by
from service.store.database import Database
from service.store.errors import IdempotencyConflict, NotFound
from service.store.locked import LockedJob
from service.store.pages import Page, cursor_of, paged

_table = tables.jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """A client's promise that two requests with one key are the same request."""

    scope: str
    """Whose key it is: the id of the API key, so that two users' keys never meet."""
    key: str
    """The `Idempotency-Key` header, at most 255 characters."""


class Jobs:
    """The jobs of the service."""

    def __init__(self, database: Database, changes: Changes, wishes: Changes) -> None:
        self._database = database
        self._changes = changes
        self._wishes = wishes

    def create(
        self,
        context: JobContext,
        spec: Mapping[str, Any],
        *,
        created_by: str | None = None,
        idempotency: Idempotency | None = None,
    ) -> tuple[Job, bool]:
        """Stores a new PENDING job; the reconciler takes it from there.

        Args:
            context: the job, resolved; its `job_id` comes from `new_job_id()`.
            spec: the document as it was sent.
            created_by: id of the API key.
            idempotency: with it, the same `spec` again gives the first job.

        Returns:
            The job, and whether it is new.

        Raises:
            IdempotencyConflict: the idempotency key, or the job id, was used with another `spec`.
        """
        try:
            job, created = self._create(context, spec, created_by, idempotency)
        except IntegrityError:
            # On PostgreSQL two of the same request get this far together. The first is stored now.
            job, created = self._create(context, spec, created_by, idempotency)
        if created:
            self._wishes.ring(job.id)
            self._changes.ring(job.id)
        return job, created

    def replay(self, idempotency: Idempotency, spec: Mapping[str, Any]) -> Job | None:
        """The job that this request made before; null where it is new.

        Ask before validating: what was accepted once is answered alike, whatever changed since.

        Raises:
            IdempotencyConflict: the key was used with another `spec`.
        """
        with self._database.reading() as connection:
            return _replayed(connection, idempotency, spec)

    def get(self, job_id: str) -> Job:
        """The job with this id.

        Raises:
            NotFound: there is none.
        """
        with self._database.reading() as connection:
            return _get(connection, job_id)

    def find(self, id_or_name: str) -> Job:
        """The job with this id, else the newest with this name.

        Raises:
            NotFound: there is neither.
        """
        newest = (
            select(_table)
            .where(_table.c.name == id_or_name)
            .order_by(_table.c.created_at.desc(), _table.c.id.desc())
            .limit(1)
        )
        with self._database.reading() as connection:
            by_id = select(_table).where(_table.c.id == id_or_name)
            row = connection.execute(by_id).mappings().one_or_none()
            if row is None:
                row = connection.execute(newest).mappings().one_or_none()
        if row is None:
            raise NotFound("job", id_or_name)
        return Job(**row)

    def page(
        self,
        *,
        limit: int,
        after: str | None = None,
        name: str | None = None,
        states: Collection[JobState] | None = None,
    ) -> Page[Job]:
        """One page of jobs, newest first.

        Args:
            limit: rows at most, 1 or more.
            after: `cursor` of the page before.
            name: only jobs with this name.
            states: only jobs in one of these.

        Raises:
            BadCursor: `after` is no cursor.
        """
        query = select(_table)
        if name is not None:
            query = query.where(_table.c.name == name)
        if states is not None:
            query = query.where(_table.c.state.in_(states))
        with self._database.reading() as connection:
            rows = connection.execute(paged(query, _table, limit=limit, after=after)).mappings()
            found = [Job(**row) for row in rows]
        items = found[:limit]
        return Page(
            items=items,
            has_more=len(found) > limit,
            cursor=cursor_of(items[-1].created_at, items[-1].id) if items else None,
        )

    def active(self) -> list[Job]:
        """All jobs that are not in a terminal state, oldest first."""
        query = (
            select(_table)
            .where(_table.c.state.not_in(TERMINAL))
            .order_by(_table.c.created_at, _table.c.id)
        )
        with self._database.reading() as connection:
            return [Job(**row) for row in connection.execute(query).mappings()]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state; all states are there."""
        query = select(_table.c.state, func.count()).group_by(_table.c.state)
        with self._database.reading() as connection:
            found: dict[JobState, int] = {row[0]: row[1] for row in connection.execute(query)}
        return {state: found.get(state, 0) for state in JobState}

    def cancel(self, job_id: str) -> Job:
        """Wishes the job's end. On a job that has ended or was cancelled before, changes nothing.

        Raises:
            NotFound: there is no such job.
        """
        with self._database.writing() as connection:
            locked = LockedJob(connection, job_id)
            if not locked.job.state.terminal and locked.job.wish is not Wish.CANCEL:
                locked.update(wish=Wish.CANCEL, updated_at=time.time())
        self._wishes.ring(job_id)
        self._changes.ring(job_id)
        return locked.job

    def queue(self, claim: Claim) -> Job:
        """PENDING -> QUEUED.

        Raises:
            ClaimLost: another reconciler holds the job.
        """
        with self._database.writing() as connection:
            locked = locked_by(connection, claim)
            locked.move(JobState.QUEUED)
        self._changes.ring(claim.job_id)
        return locked.job

    def end_without_attempt(
        self, claim: Claim, state: JobState, reason: Reason, message: str
    ) -> Job:
        """Ends a job that has no attempt alive, as FAILED or CANCELLED.

        Raises:
            ClaimLost: another reconciler holds the job.
        """
        with self._database.writing() as connection:
            locked = locked_by(connection, claim)
            if state is JobState.CANCELLED and locked.job.state is not JobState.CANCELLING:
                locked.move(JobState.CANCELLING)
            locked.move(state, reason=reason, message=message)
        self._changes.ring(claim.job_id)
        return locked.job

    def _create(
        self,
        context: JobContext,
        spec: Mapping[str, Any],
        created_by: str | None,
        idempotency: Idempotency | None,
    ) -> tuple[Job, bool]:
        now = time.time()
        with self._database.writing() as connection:
            earlier = self._earlier(connection, spec, context.job_id, idempotency)
            if earlier is not None:
                return earlier, False
            row = {
                "id": context.job_id,
                "name": context.spec.name,
                "cluster": context.spec.resources.cluster,
                "spec": dict(spec),
                "resolved": context.model_dump(mode="json"),
                "wish": Wish.RUN,
                "state": JobState.PENDING,
                "message": "",
                "created_at": now,
                "updated_at": now,
                "event_count": 0,
                "attempt_count": 0,
                "created_by": created_by,
            }
            connection.execute(insert(_table).values(row))
            if idempotency is not None:
                _remember(connection, idempotency, spec, context.job_id, now)
            return LockedJob(connection, context.job_id).job, True

    def _earlier(
        self,
        connection: Connection,
        spec: Mapping[str, Any],
        job_id: str,
        idempotency: Idempotency | None,
    ) -> Job | None:
        if idempotency is not None:
            replayed = _replayed(connection, idempotency, spec)
            if replayed is not None:
                return replayed
        same_id = select(_table).where(_table.c.id == job_id)
        row = connection.execute(same_id).mappings().one_or_none()
        if row is None:
            return None
        job = Job(**row)
        if _digest(job.spec) != _digest(spec):
            raise IdempotencyConflict(job_id, job_id)
        return job


def _get(connection: Connection, job_id: str) -> Job:
    query = select(_table).where(_table.c.id == job_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound("job", job_id)
    return Job(**row)


def _replayed(
    connection: Connection, idempotency: Idempotency, spec: Mapping[str, Any]
) -> Job | None:
    keys = tables.idempotency_keys
    query = select(keys.c.body_sha256, keys.c.job_id).where(
        keys.c.scope == idempotency.scope, keys.c.key == idempotency.key
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    if row.body_sha256 != _digest(spec):
        raise IdempotencyConflict(idempotency.key, row.job_id)
    return _get(connection, row.job_id)


def _remember(
    connection: Connection,
    idempotency: Idempotency,
    spec: Mapping[str, Any],
    job_id: str,
    now: float,
) -> None:
    connection.execute(
        insert(tables.idempotency_keys).values(
            scope=idempotency.scope,
            key=idempotency.key,
            body_sha256=_digest(spec),
            job_id=job_id,
            created_at=now,
        )
    )


def _digest(spec: Mapping[str, Any]) -> str:
    """SHA-256 of a document, whatever the order of its keys."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
