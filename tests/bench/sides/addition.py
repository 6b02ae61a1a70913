"""A side for the harness's own tests: adds up numbers, one way or another.

Options: `count`; `way` is `loop` or `sum`; `error` is added to the result.
"""

import time
from pathlib import Path
from typing import Any

from tests.bench.sides import program


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The sum of 0 to count - 1, and the seconds that it took."""
    start = time.perf_counter()
    if options["way"] == "loop":
        total = 0
        for number in range(options["count"]):
            total += number
    else:
        total = sum(range(options["count"]))
    seconds = time.perf_counter() - start
    greeting = (case / "greeting").read_text(encoding="utf-8")
    return {
        "seconds": {"add": seconds, "limit": seconds / 4},
        "total": total + options.get("error", 0),
        "greeting": greeting,
    }


if __name__ == "__main__":
    program.run(work)
