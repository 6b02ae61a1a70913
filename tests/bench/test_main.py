"""`python -m tests.bench`: what it measures, what it writes, and how it ends."""

import json
from pathlib import Path

import pytest

from tests.bench import __main__ as program
from tests.bench import catalogue, measure, report
from tests.bench.benchmark import Benchmark
from tests.bench.test_measure import addition, benchmark

FLOORS = {
    ("B1", "SFT step, 7M"): 1.5,
    ("B1", "SFT step, 50M"): 1.5,
    ("B3", "packing, 7M"): 0.8,
    ("B4", "greedy decode"): 2.0,
    ("B4", "sampled decode"): 2.0,
    ("B6", "save"): 1.0,
    ("B6", "stall"): 2.0,
    ("B7", "weight sync"): 1.5,
}
"""What is promised; a floor may rise, and never fall."""


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(measure.psutil, "cpu_percent", lambda **_: 0.0)
    monkeypatch.setattr(report, "JSON", tmp_path / "benchmarks.json")
    page = tmp_path / "benchmarks.md"
    page.write_text(f"{report.BEGIN}\n{report.END}\n", encoding="utf-8")
    defaults = {"path": report.JSON, "page": page}
    monkeypatch.setattr(report.record, "__kwdefaults__", defaults)
    monkeypatch.setattr(report.read, "__defaults__", (report.JSON,))
    return report.JSON


def run(monkeypatch: pytest.MonkeyPatch, measured: Benchmark, *arguments: str) -> int:
    monkeypatch.setattr(catalogue, "BENCHMARKS", (measured,))
    monkeypatch.setattr("sys.argv", ["bench", "--force", "--pairs", "2", *arguments])
    return program.main()


def test_a_benchmark_that_holds_is_written_and_the_program_ends_well(
    monkeypatch: pytest.MonkeyPatch, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = addition("sum", 300_000), addition("loop", 300_000)
    assert run(monkeypatch, benchmark(fast, slow), "--only", "B0") == 0
    [entry] = json.loads(files.read_text(encoding="utf-8"))
    assert (entry["id"], entry["name"], entry["holds"]) == ("B0", "adding", True)
    assert "| B0 | adding | a loop |" in capsys.readouterr().out
    # It is there now, so `--missing` has nothing to do.
    monkeypatch.setattr(measure, "run", pytest.fail)
    assert run(monkeypatch, benchmark(fast, slow), "--missing") == 0
    assert run(monkeypatch, benchmark(fast, slow), "--only", "B9") == 0


def test_a_benchmark_below_its_floor_fails_the_program(
    monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    slow, fast = addition("loop", 300_000), addition("sum", 300_000)
    assert run(monkeypatch, benchmark(slow, fast)) == 1
    [entry] = json.loads(files.read_text(encoding="utf-8"))
    assert not entry["holds"]


def test_sides_that_differ_fail_the_program_and_write_nothing(
    monkeypatch: pytest.MonkeyPatch, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, benchmark(addition("sum", 9), addition("loop", 9, error=1))) == 1
    assert not files.exists()
    assert "not reported. totals differs" in capsys.readouterr().out


def test_no_floor_is_below_what_is_promised() -> None:
    rows = {(b.id, row.name): row.floor for b in catalogue.BENCHMARKS for row in b.rows}
    for (number, name), floor in FLOORS.items():
        found = [value for key, value in rows.items() if key[0] == number and name in key[1]]
        assert found, f"{number} {name} is not measured"
        assert min(found) >= floor, f"{number} {name}"
