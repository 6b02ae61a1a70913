"""Prometheus metrics of the service; `catalogue` says which there are.

Three places keep them (`service.spec.metric.MetricSource`): what one process did is counted in it,
what rows say is read from the store at each scrape, and what running jobs say comes from their
newest events. One registry per app holds all, so that tests and several apps do not meet.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from service.launchers import Launcher
from service.metrics.clusters import ViewCollector
from service.metrics.reconciling import ReconcilerMetrics
from service.metrics.requests import RequestMetrics
from service.metrics.store_state import StoreCollector
from service.metrics.training import TrainingMetrics
from service.spec import algorithm_specs
from service.store import Store

CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServiceMetrics:
    """All metrics of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self.reconciler = ReconcilerMetrics(self.registry)
        self._training = TrainingMetrics(self.registry)

    def open(
        self, store: Store, launchers: Mapping[str, Launcher], reconcile_lag: Callable[[], float]
    ) -> Callable[[], None]:
        """Shows what the store and the clusters say, until the function that it returns is called.

        Args:
            store: whose events are counted from now on.
            launchers: by the name of their cluster.
            reconcile_lag: seconds since the reconciler last finished a round.
        """
        self.reconciler.declare(launchers)
        self._training.declare(launchers, algorithm_specs())
        store.events.on_stored(self._training.take)
        collectors = (StoreCollector(store, launchers), ViewCollector(launchers, reconcile_lag))
        for collector in collectors:
            self.registry.register(collector)

        def close() -> None:
            for collector in collectors:
                self.registry.unregister(collector)

        return close

    def declare_environments(self, environments: Iterable[str]) -> None:
        """Makes the series of these environments appear at 0."""
        self._training.declare_environments(environments)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


__all__ = ["CONTENT_TYPE", "RequestMetrics", "ServiceMetrics"]
