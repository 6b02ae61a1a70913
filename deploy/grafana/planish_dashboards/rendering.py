"""Dashboards as Grafana's JSON."""

from typing import Any

from planish_dashboards.parts import Dashboard, Panel, Variable

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def rendered(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": f"planish-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["planish"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "",
        "templating": {"list": [_data_source(), *map(_variable, dashboard.variables)]},
        "annotations": {"list": []},
        "links": [],
        "panels": _panels(dashboard),
    }


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right, a line break where one is full."""
    made: list[dict[str, Any]] = []
    y = 0
    for heading, panels in dashboard.rows:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        x, y, tallest = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            made.append(_panel(panel, number=len(made) + 1, place=place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return made


def _panel(panel: Panel, *, number: int, place: dict[str, int]) -> dict[str, Any]:
    table = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATA_SOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "instant": table,
                "range": not table,
                "format": "table" if table else "time_series",
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": _drawn(panel)}, "overrides": []},
        "options": _options(panel),
    }


def _drawn(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    return {
        "lineWidth": 1,
        "fillOpacity": 20 if panel.stacked else 0,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10}
        if panel.logarithmic
        else {"type": "linear"},
    }


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
        case _:
            return {"showHeader": True}


def _data_source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {
            "query": f"label_values({variable.of}, {variable.name})",
            "refId": variable.name,
        },
        "refresh": 2,
        "sort": 1,
        "multi": variable.several,
        "includeAll": variable.several,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"} if variable.several else {},
        "hide": 0,
    }
