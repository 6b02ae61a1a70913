"""Prometheus metrics of the service, in a registry of their own per app.

No label takes a value that a user chooses: a path is counted under its route's template, and every
path without a route under one name, so the number of series is bounded (10,000 jobs or scans for
random paths make no new ones). Whatever can be counted from rows is read from the store at scrape:
it survives a restart, is right with several replicas, and is there as 0 before the first time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
UNMATCHED = "unmatched"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")


class RequestMetrics:
    """Counts requests and their time by route template, method and class of status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # When a counter was made is of no use here and would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._count = Counter(
            "planish_http_requests",
            "Requests answered, by route template, method and class of status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "planish_http_request_seconds",
            "Time to the end of the answer in seconds (of a stream: its whole life).",
            ("route", "method"),
            buckets=(0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
            registry=registry,
        )

    def declare(self, route: str, method: str) -> None:
        """Makes the series of a route appear at 0, so that `rate` sees the first request."""
        for status in STATUS_CLASSES:
            self._count.labels(route, method, status)

    def observe(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Counts one answered request; `route` is null where no route took it."""
        known_method = method if method in METHODS else "other"
        known_route = UNMATCHED if route is None else route
        self._count.labels(known_route, known_method, f"{status // 100}xx").inc()
        self._seconds.labels(known_route, known_method).observe(seconds)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the store and the reconciler say at one scrape."""

    jobs_by_state: Mapping[str, int]
    """Every state, also those that no job is in."""
    attempts_by_reason: Mapping[str, int]
    """Attempts that ended badly, by every reason of the closed list."""
    queue_seconds: float
    """Age of the oldest job that waits for its launcher, in seconds; 0 with none."""
    reconcile_lag_seconds: float
    """Time since the reconciler last finished a round, in seconds."""


class ServiceCollector(Collector):
    """Reads the state at each scrape."""

    def __init__(self, read: Callable[[], ServiceState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yields the families that come from rows."""
        state = self._read()
        jobs = GaugeMetricFamily("planish_jobs", "Jobs by state.", labels=("state",))
        for name, count in state.jobs_by_state.items():
            jobs.add_metric((name,), count)
        yield jobs
        finished = CounterMetricFamily(
            "planish_jobs_finished", "Jobs that ended, by how.", labels=("state",)
        )
        for name in ("SUCCEEDED", "FAILED", "CANCELLED"):
            finished.add_metric((name,), state.jobs_by_state[name])
        yield finished
        attempts = CounterMetricFamily(
            "planish_attempts_failed",
            "Attempts that ended badly, by reason (LAUNCH_FAILED counts launch errors).",
            labels=("reason",),
        )
        for name, count in state.attempts_by_reason.items():
            attempts.add_metric((name,), count)
        yield attempts
        yield GaugeMetricFamily(
            "planish_queue_oldest_seconds",
            "Age of the oldest job that waits for its launcher, in seconds; 0 with none.",
            value=state.queue_seconds,
        )
        yield GaugeMetricFamily(
            "planish_reconcile_lag_seconds",
            "Time since the reconciler last finished a round, in seconds.",
            value=state.reconcile_lag_seconds,
        )


def render(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format."""
    return generate_latest(registry)
