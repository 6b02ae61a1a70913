"""What is read from the store at each scrape: it survives a restart, is right with several
replicas, and is there as 0 before the first time."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.jobs import JobState
from service.jobs.states import TERMINAL
from service.metrics import catalogue
from service.metrics.live_jobs import LiveJobs
from service.metrics.made import family
from service.spec import Reason
from service.spec.job_metrics import JOB_METRICS
from service.store import Store
from service.store.census import JobCount

Values = dict[tuple[str, ...], float]
"""By the values of a metric's labels."""

_WAITING = frozenset({JobState.PENDING, JobState.QUEUED})


class StoreCollector(Collector):
    """Reads the store at each scrape."""

    def __init__(self, store: Store, clusters: Iterable[str]) -> None:
        """Args:
        store: where the jobs are.
        clusters: of this service; their series are there before their first job.
        """
        self._store = store
        self._clusters = tuple(clusters)
        self._live = LiveJobs(store)
        self._lock = threading.Lock()  # two scrapes may come at once

    def collect(self) -> Iterator[Metric]:
        """Yields the families that come from rows."""
        with self._lock:
            yield from self._collect()

    def _collect(self) -> Sequence[Metric]:
        started, now = time.perf_counter(), time.time()
        counts = self._store.census.jobs()
        self._live.update()
        families = [
            *self._jobs(counts),
            *self._attempts(),
            *self._waiting(counts, now),
            *self._running(counts),
        ]
        read = family(catalogue.STORE_SECONDS)
        read.add_metric((), time.perf_counter() - started)
        return [*families, read]

    def _jobs(self, counts: Sequence[JobCount]) -> Iterator[Metric]:
        by_state: Values = {(c, str(s)): 0 for c in self._clusters for s in JobState}
        by_reason: Values = {(c, str(r)): 0 for c in self._clusters for r in Reason}
        for count in counts:
            key: tuple[str, ...] = (count.cluster, str(count.state))
            by_state[key] = by_state.get(key, 0) + count.jobs
            if count.state is JobState.FAILED and count.reason is not None:
                key = (count.cluster, str(count.reason))
                by_reason[key] = by_reason.get(key, 0) + count.jobs
        yield _filled(family(catalogue.JOBS), by_state)
        ended: Values = {key: n for key, n in by_state.items() if key[1] in TERMINAL}
        yield _filled(family(catalogue.JOBS_FINISHED), ended)
        yield _filled(family(catalogue.JOBS_FAILED), by_reason)

    def _attempts(self) -> Iterator[Metric]:
        failed: Values = {(c, str(r)): 0 for c in self._clusters for r in Reason}
        found = self._store.census.failed_attempts()
        failed |= {(cluster, str(reason)): n for (cluster, reason), n in found.items()}
        yield _filled(family(catalogue.ATTEMPTS_FAILED), failed)

    def _waiting(self, counts: Sequence[JobCount], now: float) -> Iterator[Metric]:
        queued: Values = {(cluster,): 0.0 for cluster in self._clusters}
        for count in counts:
            if count.state in _WAITING:
                cluster = (count.cluster,)
                queued[cluster] = max(queued.get(cluster, 0.0), now - count.oldest)
        yield _filled(family(catalogue.QUEUE_OLDEST), queued)
        starting: Values = {(cluster,): 0.0 for cluster in self._clusters}
        for name, since in self._store.census.starting_since().items():
            starting[name,] = max(now - since, 0.0)
        yield _filled(family(catalogue.STARTING_OLDEST), starting)

    def _running(self, counts: Sequence[JobCount]) -> Iterator[Metric]:
        info = family(catalogue.JOB_INFO)
        families = {metric.name: family(metric) for metric in JOB_METRICS}
        shown = 0
        for job, readings in self._live:
            shown += 1
            labels = (job.id, job.algorithm, job.cluster)
            info.add_metric((*labels, job.name, str(job.state)), 1)
            for reading in readings:
                series = (*labels, *reading.labels)
                families[reading.metric.name].add_metric(series, reading.value)
        yield info
        yield from families.values()
        held = sum(count.jobs for count in counts if count.state.holds_place)
        unshown = family(catalogue.JOBS_UNSHOWN)
        # The two are read one after the other, and a job may start between.
        unshown.add_metric((), max(held - shown, 0))
        yield unshown


def _filled(made: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in values.items():
        made.add_metric(labels, value)
    return made
