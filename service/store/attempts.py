"""Attempts: opened before anything is launched, ended when none of their processes is left."""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from service.jobs.records import Attempt
from service.jobs.states import AttemptState, JobState
from service.spec import Reason
from service.store import tables
from service.store.changes import Changes
from service.store.claims import Claim, locked_by
from service.store.database import Database
from service.store.errors import NotFound
from service.store.locked import LockedJob

_table = tables.attempts
_jobs = tables.jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended, and what becomes of its job."""

    next_state: JobState
    """SUCCEEDED, FAILED, RECOVERING or CANCELLED."""
    reason: Reason | None
    """Null where it ended well."""
    message: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
    retry_at: float | None = None
    """With RECOVERING: when the next attempt may start."""


class Attempts:
    """The attempts of all jobs."""

    def __init__(self, database: Database, changes: Changes) -> None:
        self._database = database
        self._changes = changes

    def get(self, job_id: str, number: int) -> Attempt:
        """One attempt.

        Raises:
            NotFound: there is none.
        """
        with self._database.reading() as connection:
            return find_attempt(connection, job_id, number)

    def of_job(self, job_id: str) -> list[Attempt]:
        """All attempts of a job, oldest first; empty where none was started."""
        query = select(_table).where(_table.c.job_id == job_id).order_by(_table.c.number)
        with self._database.reading() as connection:
            return [Attempt(**row) for row in connection.execute(query).mappings()]

    def may_open(self, job_id: str, *, capacity: int | None) -> bool:
        """Whether a QUEUED job would get a place now: one is free and no older job waits for it.

        Raises:
            NotFound: there is no such job.
        """
        with self._database.reading() as connection:
            return _has_place(connection, job_id, capacity)

    def open(
        self, claim: Claim, *, launcher: str, launcher_id: str, capacity: int | None
    ) -> Attempt | None:
        """QUEUED or RECOVERING -> STARTING, with a new attempt, which no token opens yet.

        Args:
            claim: the right to move the job.
            launcher: name of the launcher that will be asked.
            launcher_id: its id of attempt `job.attempt_count + 1`.
            capacity: how many jobs the launcher takes at once; null sets no limit.

        Returns:
            The attempt; null where the launcher has no place for a QUEUED job, which stays so.

        Raises:
            ClaimLost: another reconciler holds the job.
            IllegalMove: the job is in another state.
        """
        with self._database.writing() as connection:
            locked = locked_by(connection, claim)
            if locked.job.state is JobState.QUEUED:
                _lock_waiting(connection, locked.job.cluster)
                if not _has_place(connection, locked.job.id, capacity):
                    return None
            number = locked.job.attempt_count + 1
            row = {
                "job_id": locked.job.id,
                "number": number,
                "launcher": launcher,
                "launcher_id": launcher_id,
                "state": AttemptState.STARTING,
                "created_at": time.time(),
                "message": "",
                "last_seq": 0,
                "token_hash": "",
            }
            connection.execute(insert(_table).values(row))
            locked.update(attempt_count=number)
            locked.move(JobState.STARTING)
            attempt = find_attempt(connection, locked.job.id, number)
        self._changes.ring(claim.job_id)
        return attempt

    def set_token(self, claim: Claim, number: int, token_hash: str) -> None:
        """From now on the attempt's events come with the token of this SHA-256.

        Raises:
            ClaimLost: another reconciler holds the job.
        """
        with self._database.writing() as connection:
            locked_by(connection, claim)
            _write(connection, claim.job_id, number, token_hash=token_hash)

    def alive(self, claim: Claim, number: int) -> None:
        """A sign of life: STARTING -> RUNNING; changes nothing the second time.

        Raises:
            ClaimLost: another reconciler holds the job.
        """
        with self._database.writing() as connection:
            changed = mark_alive(connection, locked_by(connection, claim), number)
        if changed:
            self._changes.ring(claim.job_id)

    def stopping(self, claim: Claim, number: int, reason: Reason, message: str) -> None:
        """Writes down why the attempt is being stopped, before it is; the first reason stays.

        With CANCELLED the job becomes CANCELLING.

        Raises:
            ClaimLost: another reconciler holds the job.
        """
        with self._database.writing() as connection:
            locked = locked_by(connection, claim)
            if find_attempt(connection, claim.job_id, number).stop_reason is not None:
                return
            _write(
                connection,
                claim.job_id,
                number,
                stop_reason=reason,
                stop_asked_at=time.time(),
                message=message,
            )
            if reason is Reason.CANCELLED:
                locked.move(JobState.CANCELLING)
        self._changes.ring(claim.job_id)

    def end(self, claim: Claim, number: int, end: AttemptEnd) -> None:
        """Ends the attempt and moves the job, in one transaction.

        Raises:
            ClaimLost: another reconciler holds the job.
            IllegalMove: the job cannot become `end.next_state`.
        """
        with self._database.writing() as connection:
            locked = locked_by(connection, claim)
            if end.next_state is JobState.SUCCEEDED:
                # It ended well before anybody saw it live.
                mark_alive(connection, locked, number)
            _write(
                connection,
                claim.job_id,
                number,
                state=AttemptState.ENDED,
                ended_at=time.time(),
                exit_code=end.exit_code,
                exit_signal=end.exit_signal,
                reason=end.reason,
                message=end.message,
            )
            locked.move(
                end.next_state, reason=end.reason, message=end.message, retry_at=end.retry_at
            )
        self._changes.ring(claim.job_id)


def mark_alive(connection: Connection, locked: LockedJob, number: int) -> bool:
    """Moves an attempt, and its job where it is STARTING, to RUNNING; tells whether it did."""
    attempt = find_attempt(connection, locked.job.id, number)
    if attempt.state is not AttemptState.STARTING:
        return False
    _write(
        connection,
        locked.job.id,
        number,
        state=AttemptState.RUNNING,
        started_at=time.time(),
    )
    if locked.job.state is JobState.STARTING:
        locked.move(JobState.RUNNING)
    return True


def find_attempt(connection: Connection, job_id: str, number: int) -> Attempt:
    """One attempt, inside a transaction.

    Raises:
        NotFound: there is none.
    """
    query = select(_table).where(_table.c.job_id == job_id, _table.c.number == number)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound("attempt", f"{job_id}/{number}")
    return Attempt(**row)


def _write(connection: Connection, job_id: str, number: int, **values: Any) -> None:
    connection.execute(
        update(_table).where(_table.c.job_id == job_id, _table.c.number == number).values(**values)
    )


def _lock_waiting(connection: Connection, cluster: str) -> None:
    """Locks the rows of all jobs that wait for a place, in one order, so that places are given
    one at a time (on SQLite every writing transaction is alone anyway)."""
    connection.execute(
        select(_jobs.c.id)
        .where(_jobs.c.cluster == cluster, _jobs.c.state == JobState.QUEUED)
        .order_by(_jobs.c.id)
        .with_for_update()
    )


def _has_place(connection: Connection, job_id: str, capacity: int | None) -> bool:
    if capacity is None:
        return True
    job = connection.execute(select(_jobs).where(_jobs.c.id == job_id)).mappings().one_or_none()
    if job is None:
        raise NotFound("job", job_id)
    here = _jobs.c.cluster == job["cluster"]
    holding = [state for state in JobState if state.holds_place]
    taken = select(func.count()).where(here, _jobs.c.state.in_(holding))
    before = select(func.count()).where(
        here,
        _jobs.c.state == JobState.QUEUED,
        (_jobs.c.created_at < job["created_at"])
        | ((_jobs.c.created_at == job["created_at"]) & (_jobs.c.id < job_id)),
    )
    free = capacity - connection.execute(taken).scalar_one()
    return bool(connection.execute(before).scalar_one() < free)
