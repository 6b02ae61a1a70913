"""The dashboards of deploy/grafana: in step with their source, whole, and of what there is."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from tests.service.metrics.deployed import (
    DASHBOARDS,
    DEPLOY,
    asked,
    expressions,
    needs_promtool,
    panels,
    promtool,
    rules,
    series,
)

FILES = sorted(DASHBOARDS.glob("*.json"))


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Place(Strict):
    x: int = Field(ge=0, lt=24)
    y: int = Field(ge=0)
    w: int = Field(ge=1, le=24)
    h: int = Field(ge=1)


class DataSource(Strict):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Target(Strict):
    refId: str = Field(pattern="^[A-Z]$")
    datasource: DataSource
    expr: str = Field(min_length=1)
    legendFormat: str = Field(min_length=1)
    instant: bool
    range: bool
    format: Literal["table", "time_series"]


class Drawn(Strict):
    """Of https://grafana.com/docs/grafana/latest/panels-visualizations, what is used here."""

    unit: Literal["short", "none", "s", "ops", "reqps", "flops", "percentunit", "sci"]
    custom: dict[str, Any]


class FieldConfig(Strict):
    defaults: Drawn
    overrides: list[Any] = Field(max_length=0)


class Panel(Strict):
    id: int
    type: Literal["timeseries", "stat", "table"]
    title: str = Field(min_length=1)
    description: str
    datasource: DataSource
    gridPos: Place
    targets: list[Target] = Field(min_length=1, max_length=10)
    fieldConfig: FieldConfig
    options: dict[str, Any]


class Row(Strict):
    id: int
    type: Literal["row"]
    title: str
    collapsed: Literal[False]
    gridPos: Place
    panels: list[Any] = Field(max_length=0)


class Dashboard(Strict):
    """What Grafana's schema asks of a dashboard, for the parts that are used here."""

    uid: str = Field(pattern="^planish-[a-z]{1,20}$")
    title: str
    tags: list[str]
    schemaVersion: Literal[39]
    editable: bool
    graphTooltip: Literal[0, 1, 2]
    refresh: str
    time: dict[Literal["from", "to"], str]
    timezone: str
    templating: dict[Literal["list"], list[dict[str, Any]]]
    annotations: dict[Literal["list"], list[Any]]
    links: list[Any]
    panels: list[Panel | Row]


def test_the_files_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEPLOY / "grafana")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import dashboards

    written = {path.name: path.read_text() for path in FILES}
    assert written == dashboards.files(), "run .venv/bin/python deploy/grafana/dashboards.py"


def test_there_are_four() -> None:
    assert [path.stem for path in FILES] == ["cluster", "job", "rollout", "service"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_what_grafana_reads(path: Path) -> None:
    dashboard = Dashboard.model_validate_json(path.read_text())
    ids = [panel.id for panel in dashboard.panels]
    assert len(ids) == len(set(ids))
    covered: set[tuple[int, int]] = set()
    for panel in dashboard.panels:
        place = panel.gridPos
        assert place.x + place.w <= 24
        mine = {
            (x, y)
            for x in range(place.x, place.x + place.w)
            for y in range(place.y, place.y + place.h)
        }
        assert not covered & mine, panel.title
        covered |= mine


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_asks_only_for_variables_that_it_has(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = json.dumps(dashboard["panels"]).replace("${datasource}", "")
    named = {word for word in ("cluster", "job_id", "environment") if f"${word}" in text}
    assert named | {"datasource"} == known


@pytest.mark.parametrize(
    ("dashboard", "panel"), panels(), ids=lambda part: part if isinstance(part, str) else None
)
def test_a_panel_asks_for_what_there_is(dashboard: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        names = asked(target["expr"])
        assert names, (dashboard, target["expr"])
        assert names <= series(), (dashboard, target["expr"])


def test_every_metric_of_a_job_that_is_asked_for_is_one_number() -> None:
    """The service's replicas and the driver tell the same; without a maximum it counts twice."""
    for expression in expressions():
        for name in asked(expression):
            if name.startswith("planish_job_"):
                assert "max" in expression, expression


@needs_promtool
def test_every_expression_parses(tmp_path: Path) -> None:
    found = [*expressions(), *(rule["expr"] for rule in rules("alerts.yml"))]
    named = [{"record": f"x:{n}", "expr": expr} for n, expr in enumerate(found)]
    path = tmp_path / "expressions.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": named}]}))
    said = promtool("check", "rules", path)
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"{len(found)} rules found" in said.stdout
