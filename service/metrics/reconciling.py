"""How the reconciler gets on and how clusters answer, counted by this process."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry

from service.launchers.protocol import LaunchError, LauncherUnavailable
from service.metrics import catalogue
from service.metrics.made import counter, histogram
from service.reconciler.observer import Call

ERRORS = ("unavailable", "refused", "other")


class ReconcilerMetrics:
    """Implements `service.reconciler.observer.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rounds = histogram(catalogue.RECONCILE_SECONDS, registry)
        self._calls = histogram(catalogue.LAUNCHER_CALL_SECONDS, registry)
        self._errors = counter(catalogue.LAUNCHER_ERRORS, registry)
        self._left_queue = histogram(catalogue.LEFT_QUEUE_SECONDS, registry)

    def declare(self, clusters: Iterable[str]) -> None:
        """Makes the series of these clusters appear at 0, so that `rate` sees the first error."""
        for cluster in clusters:
            self._left_queue.labels(cluster)
            for call in get_args(Call):
                self._calls.labels(cluster, call)
                for error in ERRORS:
                    self._errors.labels(cluster, call, error)

    def round_done(self, seconds: float) -> None:
        """See `Observer`."""
        self._rounds.observe(seconds)

    def called(self, cluster: str, call: Call, seconds: float, error: Exception | None) -> None:
        """See `Observer`."""
        self._calls.labels(cluster, call).observe(seconds)
        if error is not None:
            self._errors.labels(cluster, call, _kind(error)).inc()

    def left_queue(self, cluster: str, seconds: float) -> None:
        """See `Observer`."""
        self._left_queue.labels(cluster).observe(max(seconds, 0.0))


def _kind(error: Exception) -> str:
    if isinstance(error, LauncherUnavailable):
        return "unavailable"
    return "refused" if isinstance(error, LaunchError) else "other"
