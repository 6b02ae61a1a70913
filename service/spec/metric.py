"""What is said of a metric before it has a value: its name, its labels, what it means.

Metrics are data. The code that exposes one takes its name, help and labels from here,
docs/metrics.md is made from it, and the alert rules and dashboards are tested against it.
"""

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """Prometheus' kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSource(StrEnum):
    """Where a value comes from; so it says how values of several replicas are put together."""

    PROCESS = "process"
    """Counted in one process since its start: replicas are added up, `sum(rate(...))`."""
    STORE = "store"
    """Read from the database at each scrape: every replica says the same, `max by (...)`."""
    JOB = "job"
    """The newest event of a job that runs, told by every replica and by its driver where that is
    scraped: `max by (job_id, ...)`. The series ends with the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """As it is exposed; of a counter it ends in `_total`."""
    kind: MetricKind
    source: MetricSource
    help: str
    """One sentence, with the unit."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds."""
