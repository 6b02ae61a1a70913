"""Prometheus' own objects, made from the catalogue's entries."""

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from service.spec.metric import Metric, MetricKind

# When a counter was made is of no use here and would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    """A counter of this process."""
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """A histogram of this process."""
    return Histogram(
        metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
    )


def family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    """A family for one scrape, still empty."""
    make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)
