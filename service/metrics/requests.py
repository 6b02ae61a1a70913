"""Requests, counted by this process."""

from prometheus_client import CollectorRegistry

from service.metrics import catalogue
from service.metrics.made import counter, histogram

UNMATCHED = "unmatched"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")


class RequestMetrics:
    """Counts requests and their time by route template, method and class of status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = counter(catalogue.REQUESTS, registry)
        self._seconds = histogram(catalogue.REQUEST_SECONDS, registry)

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
