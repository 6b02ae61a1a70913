"""The driver's own /metrics: what its job's newest events say, also while the service is away.

Off unless PLANISH_METRICS_PORT is set, since the service tells the same of every job. Nothing of it
may end a job: where the port is taken, the driver says so in its log and trains without.
"""

import logging
import os
import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.spec import JobContext, WorkerEvent
from service.spec.driver_variables import METRICS_PORT
from service.spec.job_metrics import JOB_METRICS, JobReadings, job_labels

log = logging.getLogger("planish")


class JobMetrics(Collector):
    """One job's metrics; `take` is called by the driver's thread, `collect` by the server's."""

    def __init__(self, context: JobContext) -> None:
        self._labels = job_labels(context)
        self._readings = JobReadings()
        self._lock = threading.Lock()

    def take(self, event: WorkerEvent) -> None:
        """Takes in one event."""
        with self._lock:
            self._readings.take(event.kind, event.time, event.step, event.data)

    def collect(self) -> Iterator[Metric]:
        """Yields the families of what is known."""
        with self._lock:
            readings = list(self._readings)
        families = {
            metric.name: GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for metric in JOB_METRICS
        }
        for reading in readings:
            labels = (*self._labels, *reading.labels)
            families[reading.metric.name].add_metric(labels, reading.value)
        yield from families.values()


class MetricsServer:
    """Serves a job's metrics, and those of this process, until `close`.

    Attributes:
        port: where it listens; None where it does not.
    """

    def __init__(self, metrics: JobMetrics) -> None:
        """Listens where PLANISH_METRICS_PORT says; without it does nothing."""
        self.port: int | None = None
        wanted = os.environ.get(METRICS_PORT)
        if not wanted:
            return
        registry = CollectorRegistry()
        registry.register(metrics)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(int(wanted), registry=registry)
        except (OSError, OverflowError, ValueError) as error:
            log.warning("%s=%s: no metrics are served: %s", METRICS_PORT, wanted, error)
            return
        self.port = self._server.server_port
        log.info("metrics are served on port %d", self.port)

    def close(self) -> None:
        """Stops listening."""
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self.port = None
