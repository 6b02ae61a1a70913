"""Writes the Grafana dashboards, dashboards/*.json, from planish_dashboards/.

    python deploy/grafana/dashboards.py

Needs nothing but Python.
"""

import json
from pathlib import Path

from planish_dashboards import cluster, job, rollout, service
from planish_dashboards.rendering import rendered

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = (cluster.CLUSTER, job.ONE, rollout.ROLLOUT, service.SERVICE)


def files() -> dict[str, str]:
    """The text of every file, by its name."""
    return {
        f"{dashboard.name}.json": json.dumps(rendered(dashboard), indent=1) + "\n"
        for dashboard in DASHBOARDS
    }


def write() -> None:
    """Writes them."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
