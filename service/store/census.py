"""How many there are of what, for metrics: read at every scrape, so each question is a short one.

The counts come from indexes alone (see `tables`): a job's row holds its spec, and reading 10,000 of
them to count them would take seconds. What is read of each job is read of those that run only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import batched

from sqlalchemy import and_, func, or_, select

from service.jobs.records import Event
from service.jobs.states import AttemptState, JobState
from service.spec import Reason
from service.store import tables
from service.store.database import Database

_jobs, _attempts, _events = tables.jobs, tables.attempts, tables.events

_AT_ONCE = 200
"""Jobs of one query for news; SQLite bounds the depth of a condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCount:
    """Jobs that stand alike."""

    cluster: str
    state: JobState
    reason: Reason | None
    jobs: int
    oldest: float
    """When the first of them was submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """What metrics say of a job by name, while it holds a place on its cluster."""

    id: str
    name: str
    cluster: str
    state: JobState
    algorithm: str
    event_count: int


class Census:
    """Counts over all jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def jobs(self) -> list[JobCount]:
        """All jobs, by cluster, state and reason; what no job stands in is left out."""
        # In the index's order, so that nothing is sorted.
        columns = (_jobs.c.state, _jobs.c.cluster, _jobs.c.reason)
        query = select(
            *columns, func.count().label("jobs"), func.min(_jobs.c.created_at).label("oldest")
        ).group_by(*columns)
        with self._database.reading() as connection:
            return [JobCount(**row) for row in connection.execute(query).mappings()]

    def failed_attempts(self) -> dict[tuple[str, Reason], int]:
        """How many attempts ended badly, by launcher and reason; 0 is left out."""
        columns = (_attempts.c.reason, _attempts.c.launcher)
        query = (
            select(*columns, func.count()).where(_attempts.c.reason.is_not(None)).group_by(*columns)
        )
        with self._database.reading() as connection:
            return {
                (launcher, reason): count for reason, launcher, count in connection.execute(query)
            }

    def starting_since(self) -> dict[str, float]:
        """When the oldest attempt was opened that shows no sign of life yet, by launcher."""
        query = (
            select(_attempts.c.launcher, func.min(_attempts.c.created_at))
            .where(_attempts.c.state == AttemptState.STARTING)
            .group_by(_attempts.c.launcher)
        )
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def live(self, *, limit: int) -> list[LiveJob]:
        """Jobs that hold a place, oldest first, `limit` at most."""
        holding = [state for state in JobState if state.holds_place]
        query = (
            select(
                _jobs.c.id,
                _jobs.c.name,
                _jobs.c.cluster,
                _jobs.c.state,
                _jobs.c.resolved["spec"]["algorithm"]["type"].as_string().label("algorithm"),
                _jobs.c.event_count,
            )
            .where(_jobs.c.state.in_(holding))
            .order_by(_jobs.c.created_at, _jobs.c.id)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [LiveJob(**row) for row in connection.execute(query).mappings()]

    def news(self, after: Mapping[str, int], *, kinds: Sequence[str]) -> list[Event]:
        """Events of these kinds with a number greater than each job's, in order, job by job."""
        found: list[Event] = []
        with self._database.reading() as connection:
            for some in batched(after.items(), _AT_ONCE):
                newer = [
                    and_(_events.c.job_id == job, _events.c.number > number) for job, number in some
                ]
                query = (
                    select(_events)
                    .where(or_(*newer), _events.c.kind.in_(kinds))
                    .order_by(_events.c.job_id, _events.c.number)
                )
                rows = connection.execute(query).mappings()
                found.extend(Event(**row) for row in rows)
        return found
