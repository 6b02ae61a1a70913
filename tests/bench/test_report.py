"""The report and the page that is made from it."""

import json
from pathlib import Path
from typing import Any

from tests.bench import report
from tests.bench.catalogue import BENCHMARKS

PAGE = f"# Benchmarks\n\n{report.BEGIN}\nold\n{report.END}\n\nRules.\n"


def entry(name: str, median: float, **changes: Any) -> dict[str, Any]:
    return {
        "id": "B4",
        "name": name,
        "about": "16 prompts",
        "peer": "generate",
        "median": median,
        "low": median - 0.1,
        "high": median + 0.1,
        "our_seconds": 1.0,
        "peer_seconds": median,
        "peer_spread": 0.02,
        "pairs": 7,
        "floor": 2.0,
        "floor_is_share": False,
        "target": 4.0,
        "share_of_limit": 0.456789,
        "holds": median >= 2.0,
        "noisy": [],
        **changes,
    }


def test_entries_take_the_place_of_older_ones(tmp_path: Path) -> None:
    path, page = tmp_path / "benchmarks.json", tmp_path / "benchmarks.md"
    page.write_text(PAGE, encoding="utf-8")
    report.record([entry("greedy", 2.0), entry("sampled", 2.5)], path=path, page=page)
    report.record([entry("greedy", 1.5, noisy=["busy"])], path=path, page=page)
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert [(e["name"], e["median"]) for e in entries] == [("greedy", 1.5), ("sampled", 2.5)]
    assert entries[0]["share_of_limit"] == 0.4568
    assert {"date", "cores", "machine", "versions"} <= set(entries[0])
    assert entries[0]["versions"]["peer trl"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Benchmarks\n")
    assert text.endswith("\n\nRules.\n")
    assert "old" not in text
    assert "**1.50** (1.40 to 1.60) | 2.0 | 4.0 | 46% | below the floor, noisy |" in text


def test_a_ratio_that_drops_is_told_unless_either_is_noisy() -> None:
    before = [entry("a", 2.0), entry("b", 2.0), entry("c", 2.0, noisy=["busy"])]
    after = [entry("a", 1.71), entry("b", 1.69), entry("c", 1.0), entry("new", 0.1)]
    assert report.dropped(after, before) == [
        "B4 b: 1.69 is over 15% below the 2.00 of the report",
    ]
    assert report.dropped([entry("b", 1.0, noisy=["busy"])], before) == []


def test_the_page_shows_what_the_report_says() -> None:
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.with_table(text, report.read())


def test_the_page_names_every_benchmark() -> None:
    text = report.PAGE.read_text(encoding="utf-8")
    for benchmark in BENCHMARKS:
        assert benchmark.id in text, benchmark.id


def test_the_report_knows_no_benchmark_that_is_not_there() -> None:
    known = {(b.id, row.name, row.peer) for b in BENCHMARKS for row in b.rows}
    assert {report.key(entry) for entry in report.read()} <= known


def test_names_of_rows_are_their_own() -> None:
    rows = [(b.id, row.name, row.peer) for b in BENCHMARKS for row in b.rows]
    assert len(rows) == len(set(rows))
    cases = [b.case for b in BENCHMARKS]
    assert len(cases) == len(set(cases))
