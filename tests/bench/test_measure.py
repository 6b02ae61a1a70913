"""The harness: fresh processes, equality before speed, and what an entry says."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import catalogue, measure
from tests.bench.benchmark import Benchmark, Result, Row, Side, Unequal, require_close, require_same
from tests.bench.cases import SIZES


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs beside the tests changes nothing, and is not waited for."""
    monkeypatch.setattr(measure.psutil, "cpu_percent", lambda **_: 0.0)


def greet(case: Path) -> None:
    (case / "greeting").write_text("hello", encoding="utf-8")


def same_total(ours: Result, peer: Result) -> None:
    require_same("totals", ours["total"], peer["total"])


def addition(way: str, count: int, error: int = 0) -> Side:
    return Side(
        module="tests.bench.sides.addition",
        python="planish",
        options={"way": way, "count": count, "error": error},
    )


def benchmark(ours: Side, peer: Side) -> Benchmark:
    return Benchmark(
        id="B0",
        case="B0",
        about="adding up",
        prepare=greet,
        ours=ours,
        peer=peer,
        check=same_total,
        rows=(
            Row(
                name="adding",
                peer="a loop",
                floor=1.2,
                target=2.0,
                ours="add",
                theirs="add",
                limit="limit",
            ),
        ),
    )


def test_a_faster_side_is_seen_to_be_faster() -> None:
    fast, slow = addition("sum", 3_000_000), addition("loop", 3_000_000)
    said: list[str] = []
    [entry] = measure.run(benchmark(fast, slow), pairs=3, force=True, say=said.append)
    assert entry["median"] > 1.2
    assert entry["holds"]
    assert entry["share_of_limit"] == pytest.approx(0.25)
    assert (entry["id"], entry["name"], entry["peer"]) == ("B0", "adding", "a loop")
    assert entry["pairs"] == 3
    assert entry["peer_seconds"] > entry["our_seconds"]
    assert len(said) == 3
    [turned] = measure.run(benchmark(slow, fast), pairs=2, force=True)
    assert turned["median"] < 1
    assert not turned["holds"]


def test_sides_that_differ_report_no_speed() -> None:
    with pytest.raises(Unequal, match="totals differs: ours is 45, the peer's 46"):
        measure.run(
            benchmark(addition("sum", 10), addition("loop", 10, error=1)), pairs=3, force=True
        )


def test_a_side_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'count'"):
        measure.run(
            benchmark(replace(addition("sum", 1), options={"way": "sum"}), addition("sum", 1)),
            force=True,
        )


def test_a_side_that_hangs_is_a_side_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_SIDE_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match=r"addition was not done after 0\.01 seconds"):
        measure.run(benchmark(addition("sum", 1), addition("sum", 1)), force=True)


def test_a_busy_machine_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.psutil, "cpu_percent", lambda **_: 60.0)
    monkeypatch.setattr(measure.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(measure.time, "sleep", lambda _: None)
    same = benchmark(addition("sum", 1000), addition("sum", 1000))
    with pytest.raises(measure.TooNoisy, match=r"1\.2 cores"):
        measure.run(same, pairs=2)
    [entry] = measure.run(same, pairs=2, force=True)
    assert "other programs keep 1.2 cores busy; at most 0.5 may be" in entry["noisy"]


def test_a_row_whose_peer_is_unsteady_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_SPREAD", -1.0)
    same, said = benchmark(addition("sum", 1000), addition("sum", 1000)), list[str]()
    assert measure.run(same, pairs=2, say=said.append) == []
    assert said[-1].startswith("B0 adding: not reported. the peer's own times spread by")
    [entry] = measure.run(same, pairs=2, force=True)
    assert entry["noisy"]


def test_numbers_that_are_close_enough_are_equal() -> None:
    require_close("losses", [1.0, 2.0], [1.0, 2.00001], relative=1e-5)
    with pytest.raises(Unequal, match=r"losses\[1\]"):
        require_close("losses", [1.0, 2.0], [1.0, 2.0001], relative=1e-5)
    with pytest.raises(Unequal, match="losses"):
        require_close("losses", [1.0], [1.0, 2.0], relative=1e-5)
    with pytest.raises(Unequal):
        require_close("losses", [float("nan")], [1.0], relative=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "tiny",
    [
        catalogue.decode("tiny", target=1.0, count=3, length=8, new=6),
        catalogue.packing("tiny", steps=1),
        catalogue.checkpoint(SIZES["tiny"]),
        catalogue.weight_sync(SIZES["tiny"]),
        catalogue.sft_step("tiny", steps=1),
        catalogue.packing_of_trl("tiny", steps=1),
    ],
    ids=["B4", "B3", "B6", "B7", "B1", "B3-TRL"],
)
def test_the_two_sides_of_a_benchmark_do_the_same_work(tiny: Benchmark, tmp_path: Path) -> None:
    """Peers that need no more than torch and transformers run in this environment."""
    needs_trl = tiny.peer.module.endswith("trl_sft")
    if needs_trl and not measure.PEERS.exists():
        pytest.skip("TRL is not installed: `make bench` makes an environment with it")
    peer = replace(tiny.peer, threads=1, python="peers" if needs_trl else "planish")
    tiny.prepare(tmp_path)
    ours = measure.start(replace(tiny.ours, threads=1), tmp_path)
    theirs = measure.start(peer, tmp_path)
    tiny.check(ours, theirs)
    for row in tiny.rows:
        assert ours["seconds"][row.ours] > 0
        assert theirs["seconds"][row.theirs] > 0
        assert row.limit is None or ours["seconds"][row.limit] > 0
        assert row.limit_ratio is None or ours[row.limit_ratio] >= 1
