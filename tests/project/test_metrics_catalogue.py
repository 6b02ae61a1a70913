"""The catalogue of metrics is whole, and docs/metrics.md is made from it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from service.metrics.catalogue import CATALOGUE, LABELS
from service.spec.metric import Metric, MetricKind

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "metrics_page", ROOT / "scripts" / "metrics_page.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    page = script()
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.page(text) == text, "run .venv/bin/python scripts/metrics_page.py"


def test_every_name_is_there_once() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_follows_the_conventions(metric: Metric) -> None:
    """https://prometheus.io/docs/practices/naming/, and one more: every label is explained."""
    assert re.fullmatch(r"planish_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
    assert bool(metric.buckets) is (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(metric.buckets)
    assert set(metric.labels) <= LABELS.keys()
    assert metric.help.endswith(".")
    assert "job" not in metric.labels  # Prometheus' own, which says who was scraped


def test_every_label_is_in_use() -> None:
    assert {label for metric in CATALOGUE for label in metric.labels} == LABELS.keys()
