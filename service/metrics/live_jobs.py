"""The newest of what running jobs said, kept up to date from the store at each scrape.

Every replica tells of every job, whichever of them its driver talks to. A scrape reads only the
events that came since the one before; of a job that is seen for the first time, as after a start of
the service, the last `LOOK_BACK`. So the cost follows the news, not the length of the jobs, and
never the number of jobs that have ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from service.spec.job_metrics import KINDS, JobReadings
from service.store import Store
from service.store.census import LiveJob

LOOK_BACK = 500
"""Events."""
MOST_JOBS = 500
"""Jobs that get series. More at once would be a flood for Prometheus; `planish_jobs` counts all."""


@dataclass(slots=True)
class _Known:
    job: LiveJob
    seen: int
    """Number of the newest event that was read."""
    readings: JobReadings = field(default_factory=JobReadings)


class LiveJobs:
    """Reads what is new. Not for two threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, _Known] = {}

    def update(self) -> None:
        """Reads the store; what is known of jobs that have ended is forgotten."""
        jobs = self._store.census.live(limit=MOST_JOBS)
        self._known = {job.id: self._known_of(job) for job in jobs}
        stale = {
            job.id: known.seen
            for job in jobs
            if (known := self._known[job.id]).seen < job.event_count
        }
        if stale:
            for event in self._store.census.news(stale, kinds=KINDS):
                known = self._known[event.job_id]
                known.readings.take(event.kind, event.time, event.step, event.data)
                known.seen = event.number
        for known in self._known.values():
            known.seen = max(known.seen, known.job.event_count)

    def __iter__(self) -> Iterator[tuple[LiveJob, JobReadings]]:
        """Every job that held a place at the last update."""
        return ((known.job, known.readings) for known in self._known.values())

    def _known_of(self, job: LiveJob) -> _Known:
        known = self._known.get(job.id)
        if known is None:
            return _Known(job, max(0, job.event_count - LOOK_BACK))
        known.job = job
        return known
