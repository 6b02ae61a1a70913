"""Claims: which reconciler works on a job just now.

A claim is a random token in the job's row, with an expiry. Whoever took it works outside any
transaction, then applies the result in one that checks the token. Where the claim ran out and
another reconciler took it meanwhile, the token differs and the result is refused.
"""

import secrets
import time
from dataclasses import dataclass

from sqlalchemy import Connection, or_, update

from service.store import tables
from service.store.database import Database
from service.store.errors import ClaimLost
from service.store.locked import LockedJob

_table = tables.jobs


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to move one job."""

    job_id: str
    token: str


class Claims:
    """Takes and gives back claims."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, job_id: str, *, lease_seconds: float) -> Claim | None:
        """The claim on a job; null where another holds it or the job is gone."""
        claim = Claim(job_id, secrets.token_hex(16))
        now = time.time()
        query = (
            update(_table)
            .where(
                _table.c.id == job_id,
                or_(_table.c.lock_token.is_(None), _table.c.lock_expires_at < now),
            )
            .values(lock_token=claim.token, lock_expires_at=now + lease_seconds)
        )
        with self._database.writing() as connection:
            taken = connection.execute(query).rowcount == 1
        return claim if taken else None

    def extend(self, claim: Claim, *, lease_seconds: float) -> None:
        """Holds the claim for `lease_seconds` from now.

        Raises:
            ClaimLost: another reconciler holds the job.
        """
        with self._database.writing() as connection:
            locked = locked_by(connection, claim)
            locked.update(lock_expires_at=time.time() + lease_seconds)

    def release(self, claim: Claim) -> None:
        """Gives the claim back; one that was lost is left alone."""
        query = (
            update(_table)
            .where(_table.c.id == claim.job_id, _table.c.lock_token == claim.token)
            .values(lock_token=None, lock_expires_at=None)
        )
        with self._database.writing() as connection:
            connection.execute(query)


def locked_by(connection: Connection, claim: Claim) -> LockedJob:
    """Locks a job's row for the holder of its claim.

    Raises:
        ClaimLost: the claim is not the job's any more.
    """
    locked = LockedJob(connection, claim.job_id)
    if locked.job.lock_token != claim.token:
        raise ClaimLost(claim.job_id)
    return locked
