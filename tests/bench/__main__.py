"""`python -m tests.bench`: measures, and writes docs/benchmarks.json and the table of its page."""

import argparse
import subprocess
import sys

from tests.bench import catalogue, measure, report
from tests.bench.benchmark import Unequal
from tests.bench.statistics import PAIRS


def main() -> int:
    """Measures what was asked for; 1 where something failed, is below its floor, or is well below
    what the report had."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="ids or cases, such as B4 B1-7M")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--missing", action="store_true", help="leave out what is in the report")
    parser.add_argument("--force", action="store_true", help="report on a busy machine, marked so")
    arguments = parser.parse_args()
    subprocess.run([measure.ROOT / "scripts" / "bench_peers.sh"], check=True)
    before = report.read()
    known = {report.key(entry) for entry in before}
    failed = False
    for benchmark in catalogue.BENCHMARKS:
        wanted = not arguments.only or {benchmark.id, benchmark.case} & set(arguments.only)
        done = all((benchmark.id, row.name, row.peer) in known for row in benchmark.rows)
        if not wanted or (arguments.missing and done):
            continue
        try:
            entries = measure.run(benchmark, pairs=arguments.pairs, force=arguments.force, say=_say)
        except (Unequal, RuntimeError) as error:
            _say(f"{benchmark.id} {benchmark.case}: not reported. {error}")
            failed = True
            continue
        drops = report.dropped(entries, before)
        for line in drops:
            _say(f"{line}, which stays as it is")
        failed |= bool(drops)
        if not drops:
            report.record(entries)
        failed |= len(entries) < len(benchmark.rows)
        failed |= not all(entry["holds"] for entry in entries)
        _say(report.table(entries))
    return int(failed)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
