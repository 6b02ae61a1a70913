"""Writes the tables of docs/metrics.md from the metrics' catalogue; a test compares the two.

.venv/bin/python scripts/metrics_page.py
"""

from pathlib import Path

from service.metrics.catalogue import GROUPS, LABELS
from service.spec.job_metrics import JOB_LABELS
from service.spec.metric import Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- tables: scripts/metrics_page.py -->\n", "<!-- end of tables -->\n"


def tables() -> str:
    """The tables of all metrics, and of the labels' values."""
    parts = [_group(title, metrics) for title, metrics in GROUPS.items()]
    rows = "".join(f"| `{label}` | {values} |\n" for label, values in LABELS.items())
    parts.append(f"### Labels\n\n| Label | Values |\n|---|---|\n{rows}")
    return "\n" + "\n".join(parts) + "\n"


def page(before: str) -> str:
    """The page with its tables made anew."""
    head, rest = before.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + tables() + END + tail


def _group(title: str, metrics: tuple[Metric, ...]) -> str:
    shared = all(set(JOB_LABELS) <= set(metric.labels) for metric in metrics)
    note = f"Each has the labels {_names(JOB_LABELS)}.\n\n" if shared else ""
    rows = "".join(map(_job_row if shared else _row, metrics))
    header = "| Metric | Kind | Labels | From | Meaning |\n|---|---|---|---|---|\n"
    if shared:
        header = "| Metric | More labels | Meaning |\n|---|---|---|\n"
    return f"### {title}\n\n{note}{header}{rows}"


def _row(metric: Metric) -> str:
    labels = _names(metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.source} | {metric.help} |\n"


def _job_row(metric: Metric) -> str:
    more = tuple(label for label in metric.labels if label not in JOB_LABELS)
    return f"| `{metric.name}` | {_names(more)} | {metric.help} |\n"


def _names(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
