"""What a dashboard is made of. Where a panel stands follows from its order.

Every replica of the service, and a job's driver, tell the same of a job, so queries of jobs take
`max by (job_id)`; see docs/metrics.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

JOB = 'cluster=~"$cluster", job_id=~"$job_id"'
"""Selects the series of the job, or jobs, that are chosen."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    description: str = ""
    stacked: bool = False
    logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice at the top of a dashboard: the values of a label."""

    name: str
    of: str
    """The series whose label it is."""
    label: str = ""
    several: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard: rows of panels under headings."""

    name: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[Variable] = field(default_factory=tuple)


def per_job(metric: str, title: str, unit: str = "short", **more: Any) -> Panel:
    """One line for each job."""
    query = Query(f"max by (job_id) ({metric}{{{JOB}}})", "{{job_id}}")
    return Panel(title=title, unit=unit, queries=[query], **more)


def stat(title: str, expr: str, unit: str = "short", **more: Any) -> Panel:
    """One number."""
    return Panel(title=title, queries=[Query(expr)], unit=unit, kind="stat", height=4, **more)


def quantiles(histogram: str, by: str, where: str = "") -> list[Query]:
    """The median and the 95th percentile of a histogram, for each value of a label."""
    rate = f"sum by (le, {by}) (rate({histogram}_bucket{{{where}}}[$__rate_interval]))"
    return [
        Query(f"histogram_quantile({quantile}, {rate})", f"{{{{{by}}}}} {name}")
        for quantile, name in ((0.5, "median"), (0.95, "p95"))
    ]


CLUSTERS = Variable(name="cluster", of="planish_jobs", label="Cluster")
JOBS = Variable(name="job_id", of='planish_job_info{cluster=~"$cluster"}', label="Job")
ONE_JOB = Variable(
    name="job_id", of='planish_job_info{cluster=~"$cluster"}', label="Job", several=False
)
ENVIRONMENTS = Variable(name="environment", of="planish_episodes_total", label="Environment")
