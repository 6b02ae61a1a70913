"""The rules and dashboards of deploy/, for tests."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics.catalogue import CATALOGUE
from service.spec.metric import MetricKind

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = DEPLOY / "prometheus" / "rules"
DASHBOARDS = DEPLOY / "grafana" / "dashboards"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What promtool says."""
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def rules(name: str) -> list[dict[str, Any]]:
    """All rules of a file."""
    document = yaml.safe_load((RULES / name).read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Every panel with queries, with the name of its dashboard."""
    return [
        (path.stem, panel)
        for path in sorted(DASHBOARDS.glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        if panel["type"] != "row"
    ]


def expressions() -> list[str]:
    """Every expression of the dashboards, as Grafana asks it with everything chosen."""
    found = [target["expr"] for _, panel in panels() for target in panel["targets"]]
    return [re.sub(r"\$\w+", ".*", expr.replace("$__rate_interval", "1m")) for expr in found]


def series() -> set[str]:
    """Every name that a rule or a dashboard may ask for."""
    names = {"up", "ALERTS", *(rule["record"] for rule in rules("recording.yml"))}
    for metric in CATALOGUE:
        histogram = metric.kind is MetricKind.HISTOGRAM
        parts = ("_bucket", "_sum", "_count") if histogram else ("",)
        names |= {metric.name + part for part in parts}
    return names


def asked(expression: str) -> set[str]:
    """The names of series in an expression."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    return set(re.findall(r"\b(?:up|ALERTS|planish_\w+|\w+:planish_\w+:?\w*)\b", bare))
