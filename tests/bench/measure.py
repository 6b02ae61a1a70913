"""Runs a benchmark: fresh processes in pairs, equality before speed, an idle machine or none.

A side is started as `python -m MODULE CASE OPTIONS OUT`: the case's folder, its options as JSON,
and the file that it must write its result to.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.bench.benchmark import Benchmark, Result, Row, Side
from tests.bench.statistics import MOST_SPREAD, PAIRS, Ratio, order

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-bench" / "bin" / "python"
MOST_LOAD = 0.5
_SIDE_SECONDS = 400


class TooNoisy(RuntimeError):
    """The machine is not idle enough for a number to mean anything."""


def run(
    benchmark: Benchmark,
    *,
    pairs: int = PAIRS,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Measures one benchmark.

    Args:
        benchmark: which.
        pairs: how many times both sides run.
        force: report on a busy machine too; the entries then say so.
        say: told of progress.

    Returns:
        An entry of the report for each of its rows; without `force`, only of those where the peer's
        own times do not spread too much.

    Raises:
        TooNoisy: other programs keep the machine busy.
        Unequal: the two sides did different work.
        RuntimeError: a side failed.
    """
    noise = _busy()
    if noise and not force:
        raise TooNoisy(noise)
    results: dict[str, list[Result]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory(prefix=f"{benchmark.id}-") as folder:
        case = Path(folder)
        benchmark.prepare(case)
        for pair in range(pairs):
            for name in order(pair):
                side = benchmark.ours if name == "ours" else benchmark.peer
                results[name].append(start(side, case))
            benchmark.check(results["ours"][-1], results["peer"][-1])
            say(_progress(benchmark, pair, results))
    entries = [_entry(benchmark, row, results, noise) for row in benchmark.rows]
    for entry in entries:
        if entry["noisy"] and not force:
            say(f"{benchmark.id} {entry['name']}: not reported. {'; '.join(entry['noisy'])}")
    return [entry for entry in entries if force or not entry["noisy"]]


def start(side: Side, case: Path) -> Result:
    """One run of a side, in a process of its own.

    Raises:
        RuntimeError: it failed, took too long, or its environment is missing.
    """
    python = sys.executable if side.python == "planish" else str(PEERS)
    if not Path(python).exists():
        raise RuntimeError(f"there is no {python}: run `make bench`, which makes it")
    out = case / "result.json"
    out.unlink(missing_ok=True)
    command = [python, "-W", "ignore", "-m", side.module, str(case), json.dumps(side.options)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(side.threads),
        # A peer's torch is compiled once, and not anew by each process: that takes seconds.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        done = subprocess.run(
            [*command, str(out)],
            cwd=case,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SIDE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{side.module} was not done after {error.timeout} seconds") from error
    if done.returncode or not out.exists():
        raise RuntimeError(f"{side.module} failed:\n{done.stderr[-3000:]}")
    result: Result = json.loads(out.read_text(encoding="utf-8"))
    return result


def _busy() -> str | None:
    """Says so where other programs use more than `MOST_LOAD` cores, for seconds on end.

    The load average would count our own run of a minute ago.
    """
    for attempt in range(5):
        cores = psutil.cpu_percent(interval=3) / 100 * (psutil.cpu_count() or 1)
        if cores <= MOST_LOAD:
            return None
        time.sleep(attempt)
    return f"other programs keep {cores:.1f} cores busy; at most {MOST_LOAD} may be"


def _progress(benchmark: Benchmark, pair: int, results: dict[str, list[Result]]) -> str:
    ours, peer = results["ours"][-1]["seconds"], results["peer"][-1]["seconds"]
    ratios = ", ".join(
        f"{row.name} {peer[row.theirs] / ours[row.ours]:.2f}" for row in benchmark.rows
    )
    return f"{benchmark.id} {benchmark.case} pair {pair + 1}: {ratios}"


def _entry(
    benchmark: Benchmark, row: Row, results: dict[str, list[Result]], noise: str | None
) -> dict[str, Any]:
    ratio = Ratio.of(
        [result["seconds"][row.ours] for result in results["ours"]],
        [result["seconds"][row.theirs] for result in results["peer"]],
    )
    reasons = [noise] if noise else []
    if ratio.peer_spread > MOST_SPREAD:
        reasons.append(f"the peer's own times spread by {ratio.peer_spread:.0%}")
    share = _share(row, ratio, results["ours"])
    reached = share if row.floor_is_share else ratio.median
    return {
        "id": benchmark.id,
        "name": row.name,
        "about": benchmark.about,
        "peer": row.peer,
        **asdict(ratio),
        "pairs": len(results["ours"]),
        "floor": row.floor,
        "floor_is_share": row.floor_is_share,
        "target": row.target,
        "share_of_limit": share,
        "holds": reached is not None and reached >= row.floor,
        "noisy": reasons,
    }


def _share(row: Row, ratio: Ratio, ours: list[Result]) -> float | None:
    """How much of what the machine could do at most is reached."""
    if row.limit is not None:
        return median(r["seconds"][row.limit] / r["seconds"][row.ours] for r in ours)
    if row.limit_ratio is not None:
        return ratio.median / float(ours[0][row.limit_ratio])
    return None
