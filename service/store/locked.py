"""A job's row, locked for the rest of a transaction: the only way to move a job or add an event.

Every writer of a job takes this lock first, so the numbers of its events have no gap and no double,
and a move is checked against the state it starts from.
"""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from service.jobs.records import Job
from service.jobs.states import JobState, check_move
from service.spec import Reason
from service.store import tables
from service.store.errors import NotFound


class LockedJob:
    """One job inside a writing transaction."""

    def __init__(self, connection: Connection, job_id: str) -> None:
        """Locks the row.

        Raises:
            NotFound: there is no such job.
        """
        query = select(tables.jobs).where(tables.jobs.c.id == job_id).with_for_update()
        row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound("job", job_id)
        self._connection = connection
        self.job = Job(**row)

    def update(self, **values: Any) -> None:
        """Writes columns, and reads the row again."""
        mine = tables.jobs.c.id == self.job.id
        self._connection.execute(update(tables.jobs).where(mine).values(**values))
        row = self._connection.execute(select(tables.jobs).where(mine)).mappings().one()
        self.job = Job(**row)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds events at the end of the log; rows hold all columns but `job_id` and `number`."""
        first = self.job.event_count + 1
        self._connection.execute(
            insert(tables.events),
            [
                {**row, "job_id": self.job.id, "number": number}
                for number, row in enumerate(rows, start=first)
            ],
        )
        self.update(event_count=self.job.event_count + len(rows))

    def move(
        self,
        new: JobState,
        *,
        reason: Reason | None = None,
        message: str = "",
        retry_at: float | None = None,
    ) -> None:
        """Moves the job and writes the move into its log; an ended job is nobody's any more.

        Nobody looks at an ended job again, so a claim that was given back after this, in a
        transaction of its own, would stay for ever where the service is killed between the two.

        Raises:
            IllegalMove: the table of moves does not hold it.
        """
        old = self.job.state
        check_move(self.job.id, old, new)
        now = time.time()
        self.update(state=new, reason=reason, message=message, retry_at=retry_at, updated_at=now)
        if new.terminal:
            self.update(lock_token=None, lock_expires_at=None)
        data = {"from": old, "to": new, "reason": reason, "message": message}
        self.append(
            [
                {
                    "time": now,
                    "attempt": self.job.attempt_count or None,
                    "seq": None,
                    "kind": "state",
                    "step": None,
                    "data": data,
                }
            ]
        )
