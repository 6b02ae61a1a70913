"""docs/benchmarks.json, and the table of docs/benchmarks.md that is made from it."""

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from tests.bench.measure import ROOT

JSON = ROOT / "docs" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PEERS = ROOT / "tests" / "bench" / "peers.txt"
BEGIN, END = "<!-- table: make bench -->", "<!-- end of table -->"
MOST_DROP = 0.15
"""By how much a ratio may be below the one that the report had."""


def read(path: Path = JSON) -> list[dict[str, Any]]:
    """The entries of a report; none where there is no report."""
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return entries


def key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """What tells an entry from all others."""
    return entry["id"], entry["name"], entry["peer"]


def record(entries: Sequence[Mapping[str, Any]], *, path: Path = JSON, page: Path = PAGE) -> None:
    """Puts entries into the report in the place of older ones of the same name, and rewrites the
    page's table."""
    stamp = {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": psutil.cpu_count(),
        "machine": _processor(),
        "versions": {**_versions(), **_peers()},
    }
    merged = {key(entry): entry for entry in read(path)}
    merged |= {key(entry): {**_rounded(entry), **stamp} for entry in entries}
    ordered = [merged[one] for one in sorted(merged)]
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    page.write_text(with_table(text, ordered), encoding="utf-8")


def dropped(entries: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to say of ratios that are well below the report's; nothing is said of noisy ones."""
    steady = {key(entry): entry["median"] for entry in before if not entry["noisy"]}
    return [
        f"{entry['id']} {entry['name']}: {entry['median']:.2f} is over {MOST_DROP:.0%} below the "
        f"{steady[key(entry)]:.2f} of the report"
        for entry in entries
        if not entry["noisy"]
        and key(entry) in steady
        and entry["median"] < (1 - MOST_DROP) * steady[key(entry)]
    ]


def with_table(text: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(entries)}\n{END}{after}"


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    if not entries:
        return "\nNothing has been measured yet.\n"
    lines = [
        "",
        "| id | what | against | ratio (10% to 90%) | floor | aim | share of the limit | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(entry) for entry in entries]
    return "\n".join([*lines, ""])


def _line(entry: Mapping[str, Any]) -> str:
    share = entry["share_of_limit"]
    floor = f"{entry['floor']:.0%} of the limit" if entry["floor_is_share"] else entry["floor"]
    verdict = "" if entry["holds"] else "below the floor"
    if entry["noisy"]:
        verdict = ", ".join(filter(None, [verdict, "noisy"]))
    cells = [
        entry["id"],
        entry["name"],
        entry["peer"],
        f"**{entry['median']:.2f}** ({entry['low']:.2f} to {entry['high']:.2f})",
        f"{floor}",
        f"{entry['target']}",
        "" if share is None else f"{share:.0%}",
        verdict,
    ]
    return "| " + " | ".join(cells) + " |"


def _rounded(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in entry.items()}


def _versions() -> dict[str, str]:
    names = ("planish", "torch", "megatron-core")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _peers() -> dict[str, str]:
    lines = PEERS.read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if "==" in line]
    return {f"peer {name}": pin for name, pin in pins}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
