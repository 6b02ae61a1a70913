"""Every metric of the service, as data; docs/metrics.md is made from it.

No label takes a value that a user chooses, but for those of a job while it lives: a path is counted
under its route's template, and a cluster, an algorithm or an environment is one that is installed.
"""

from collections.abc import Mapping

from service.spec.job_metrics import JOB_LABELS, JOB_METRICS
from service.spec.metric import Metric, MetricKind, MetricSource

SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
"""Buckets of requests and calls."""
LONG_SECONDS = (0.1, 0.5, 2.0, 10.0, 30.0, 120.0, 600.0, 3600.0)
"""Buckets of what a job does."""
QUEUE_SECONDS = (1.0, 10.0, 60.0, 600.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
"""Buckets of waiting for a place."""


def _counter(name: str, source: MetricSource, help: str, *labels: str) -> Metric:
    return Metric(
        name=f"planish_{name}_total",
        kind=MetricKind.COUNTER,
        source=source,
        help=help,
        labels=labels,
    )


def _gauge(name: str, source: MetricSource, help: str, *labels: str) -> Metric:
    return Metric(
        name=f"planish_{name}", kind=MetricKind.GAUGE, source=source, help=help, labels=labels
    )


def _histogram(name: str, buckets: tuple[float, ...], help: str, *labels: str) -> Metric:
    return Metric(
        name=f"planish_{name}",
        kind=MetricKind.HISTOGRAM,
        source=MetricSource.PROCESS,
        help=help,
        labels=labels,
        buckets=buckets,
    )


_PROCESS, _STORE, _JOB = MetricSource.PROCESS, MetricSource.STORE, MetricSource.JOB

REQUESTS = _counter(
    "http_requests",
    _PROCESS,
    "Requests answered, by route template, method and class of status.",
    "route",
    "method",
    "status",
)
REQUEST_SECONDS = _histogram(
    "http_request_seconds",
    SECONDS,
    "Time to the end of the answer in seconds (of a stream: its whole life).",
    "route",
    "method",
)

JOBS = _gauge("jobs", _STORE, "Jobs by state.", "cluster", "state")
JOBS_FINISHED = _counter("jobs_finished", _STORE, "Jobs that ended, by how.", "cluster", "state")
JOBS_FAILED = _counter("jobs_failed", _STORE, "Jobs that failed, by why.", "cluster", "reason")
ATTEMPTS_FAILED = _counter(
    "attempts_failed",
    _STORE,
    "Attempts that ended badly, by why; another may have followed.",
    "cluster",
    "reason",
)
QUEUE_OLDEST = _gauge(
    "queue_oldest_seconds",
    _STORE,
    "Age of the oldest job that waits in the service for a place, in seconds; 0 with none.",
    "cluster",
)
STARTING_OLDEST = _gauge(
    "starting_oldest_seconds",
    _STORE,
    "Age of the oldest attempt that was handed over and shows no life yet, in seconds; 0 with "
    "none. A cluster's own queue is in it.",
    "cluster",
)
JOBS_UNSHOWN = _gauge(
    "jobs_unshown", _STORE, "Running jobs that have no series, since there are too many."
)
STORE_SECONDS = _gauge(
    "store_read_seconds", _PROCESS, "Time that this scrape took to read the database, in seconds."
)

RECONCILE_LAG = _gauge(
    "reconcile_lag_seconds",
    _PROCESS,
    "Time since the reconciler last finished a round, in seconds.",
)
RECONCILE_SECONDS = _histogram(
    "reconcile_round_seconds", SECONDS, "Time of a round over all jobs that have not ended."
)
LEFT_QUEUE_SECONDS = _histogram(
    "queue_seconds",
    QUEUE_SECONDS,
    "Time from a job's submission to its first attempt, in seconds.",
    "cluster",
)
LAUNCHER_CALL_SECONDS = _histogram(
    "launcher_call_seconds", SECONDS, "Time of a call to a cluster, in seconds.", "cluster", "call"
)
LAUNCHER_ERRORS = _counter(
    "launcher_errors",
    _PROCESS,
    "Calls to a cluster that brought no answer, or a refusal.",
    "cluster",
    "call",
    "error",
)
WATCH_AGE = _gauge(
    "launcher_watch_age_seconds",
    _PROCESS,
    "Time since the cluster's watch last heard of it, in seconds; only where there is a watch.",
    "cluster",
)

EVENTS = _counter("events", _PROCESS, "Events of workers that were stored, by kind.", "kind")
STEPS = _counter(
    "training_steps",
    _PROCESS,
    "Steps done. A step that is done again after a fault counts again.",
    "algorithm",
    "cluster",
)
STEPS_LEFT_OUT = _counter(
    "training_steps_left_out",
    _PROCESS,
    "Steps left out, since their loss or gradient was not a number or jumped.",
    "algorithm",
    "cluster",
)
TOKENS = _counter("training_tokens", _PROCESS, "Tokens trained.", "algorithm", "cluster")
PHASE = _histogram(
    "step_phase_seconds",
    LONG_SECONDS,
    "Time of each phase of a step, in seconds; `sync` hands the new weights to the generator.",
    "phase",
)
CHECKPOINTS = _counter("checkpoints", _PROCESS, "Checkpoints published.", "algorithm", "cluster")
CHECKPOINTS_MISSED = _counter(
    "checkpoints_missed",
    _PROCESS,
    "Checkpoints given up, since the storage refused.",
    "algorithm",
    "cluster",
)
CHECKPOINT_SECONDS = _histogram(
    "checkpoint_seconds",
    LONG_SECONDS,
    "Time from a checkpoint's request to its publication, in seconds.",
)
EPISODES = _counter("episodes", _PROCESS, "Episodes played.", "environment")
EPISODES_FAILED = _counter(
    "episodes_failed", _PROCESS, "Episodes whose environment raised an error.", "environment"
)
EPISODES_UNSCORED = _counter(
    "episodes_unscored", _PROCESS, "Episodes that the environment could not score.", "environment"
)
JOB_INFO = Metric(
    name="planish_job_info",
    kind=MetricKind.GAUGE,
    source=_JOB,
    help="1 for each job that holds a place on its cluster.",
    labels=(*JOB_LABELS, "name", "state"),
)

SERVICE_METRICS: tuple[Metric, ...] = (
    REQUESTS,
    REQUEST_SECONDS,
    JOBS,
    JOBS_FINISHED,
    JOBS_FAILED,
    ATTEMPTS_FAILED,
    QUEUE_OLDEST,
    STARTING_OLDEST,
    LEFT_QUEUE_SECONDS,
    RECONCILE_LAG,
    RECONCILE_SECONDS,
    LAUNCHER_CALL_SECONDS,
    LAUNCHER_ERRORS,
    WATCH_AGE,
    STORE_SECONDS,
    JOBS_UNSHOWN,
)
TRAINING_METRICS: tuple[Metric, ...] = (
    EVENTS,
    STEPS,
    STEPS_LEFT_OUT,
    TOKENS,
    PHASE,
    CHECKPOINTS,
    CHECKPOINTS_MISSED,
    CHECKPOINT_SECONDS,
)
ENVIRONMENT_METRICS: tuple[Metric, ...] = (EPISODES, EPISODES_FAILED, EPISODES_UNSCORED)

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "The service": SERVICE_METRICS,
    "Training, over all jobs": TRAINING_METRICS,
    "Environments, over all jobs": ENVIRONMENT_METRICS,
    "A running job": (JOB_INFO, *JOB_METRICS),
}
CATALOGUE: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)

LABELS: Mapping[str, str] = {
    "route": "template of a route of the API, or `unmatched`",
    "method": "a method that HTTP has, or `other`",
    "status": "`2xx`, `3xx`, `4xx`, `5xx`",
    "cluster": "a name in the clusters file",
    "state": "a state of [a job](jobs.md#states-of-a-job)",
    "reason": "a reason of the [closed list](jobs.md#attempts)",
    "call": "`submit`, `poll`, `cancel`",
    "error": "`unavailable` (no answer), `refused` (it cannot be started), `other`",
    "kind": "a kind of [worker's event](jobs.md#events)",
    "algorithm": "an algorithm that is installed",
    "phase": "`data`, `rollout`, `reward`, `logprobs`, `advantage`, `update`, `sync`",
    "environment": "an environment's id, as jobs name it",
    "mode": "`sampled`, `greedy`, `validation`",
    "job_id": "id of a job that holds a place on its cluster",
    "name": "the name of such a job",
}
"""The values that each label takes."""
