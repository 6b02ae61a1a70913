"""How fresh the service's view of its clusters is, at each scrape."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from service.launchers import Launcher
from service.metrics import catalogue
from service.metrics.made import family


class ViewCollector(Collector):
    """Asks the reconciler and the launchers, none of which waits for anybody."""

    def __init__(
        self, launchers: Mapping[str, Launcher], reconcile_lag: Callable[[], float]
    ) -> None:
        self._launchers = launchers
        self._reconcile_lag = reconcile_lag

    def collect(self) -> Iterator[Metric]:
        """Yields the families."""
        lag = family(catalogue.RECONCILE_LAG)
        lag.add_metric((), self._reconcile_lag())
        yield lag
        watches = family(catalogue.WATCH_AGE)
        for name, launcher in self._launchers.items():
            age = getattr(launcher, "watch_age_seconds", None)  # not every cluster has a watch
            if age is not None:
                watches.add_metric((name,), age)
        yield watches
