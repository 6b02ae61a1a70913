"""What workers' events add up to, over all jobs, counted by the process that stored them.

Each event is stored once, whichever replica it came to and however often it was sent, so the sum
over replicas is right. A process that starts anew counts from 0, as Prometheus expects.
"""

from collections.abc import Iterable, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry

from service.jobs import Job
from service.metrics import catalogue
from service.metrics.made import counter, histogram
from service.spec import WorkerEvent
from service.spec.attempt import EventKind
from service.spec.job_metrics import PHASES, number, phase_seconds


class TrainingMetrics:
    """Counts workers' events; `take` is a listener of `service.store.events.Events`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._events = counter(catalogue.EVENTS, registry)
        self._steps = counter(catalogue.STEPS, registry)
        self._left_out = counter(catalogue.STEPS_LEFT_OUT, registry)
        self._tokens = counter(catalogue.TOKENS, registry)
        self._phases = histogram(catalogue.PHASE, registry)
        self._checkpoints = counter(catalogue.CHECKPOINTS, registry)
        self._missed = counter(catalogue.CHECKPOINTS_MISSED, registry)
        self._checkpoint_seconds = histogram(catalogue.CHECKPOINT_SECONDS, registry)
        self._episodes = counter(catalogue.EPISODES, registry)
        self._failed = counter(catalogue.EPISODES_FAILED, registry)
        self._unscored = counter(catalogue.EPISODES_UNSCORED, registry)
        for kind in get_args(EventKind):
            self._events.labels(kind)
        for phase in PHASES:
            self._phases.labels(phase)

    def declare(self, clusters: Iterable[str], algorithms: Iterable[str]) -> None:
        """Makes the series of these appear at 0, so that `rate` sees the first step."""
        names = list(algorithms)
        of_jobs = (self._steps, self._left_out, self._tokens, self._checkpoints, self._missed)
        for cluster in clusters:
            for algorithm in names:
                for metric in of_jobs:
                    metric.labels(algorithm, cluster)

    def declare_environments(self, environments: Iterable[str]) -> None:
        """Makes the series of these appear at 0."""
        for environment in environments:
            for metric in (self._episodes, self._failed, self._unscored):
                metric.labels(environment)

    def take(self, job: Job, events: Sequence[WorkerEvent]) -> None:
        """Counts events that were just stored."""
        spec = job.resolved["spec"]
        of_job = (spec["algorithm"]["type"], job.cluster)
        environment = (spec.get("environment") or {}).get("id")
        for event in events:
            self._events.labels(event.kind).inc()
            if event.kind == "metrics":
                self._take_step(event, of_job)
                if environment is not None:
                    self._take_episodes(event, environment)
            elif event.kind == "checkpoint":
                self._checkpoints.labels(*of_job).inc()
                self._checkpoint_seconds.observe(number(event.data, "seconds"))
            elif event.kind == "warning" and "missed" in event.data:
                self._missed.labels(*of_job).inc()

    def _take_step(self, event: WorkerEvent, of_job: tuple[str, str]) -> None:
        if event.data.get("left_out"):
            self._left_out.labels(*of_job).inc()
            return
        self._steps.labels(*of_job).inc()
        self._tokens.labels(*of_job).inc(max(number(event.data, "tokens"), 0.0))
        for phase, seconds in phase_seconds(event.data).items():
            self._phases.labels(phase).observe(seconds)

    def _take_episodes(self, event: WorkerEvent, environment: str) -> None:
        for metric, name in (
            (self._episodes, "episodes"),
            (self._failed, "episodes_failed"),
            (self._unscored, "episodes_unscored"),
        ):
            metric.labels(environment).inc(max(number(event.data, name), 0.0))
