"""Our checkpoints on two tensor-parallel ranks; loaded on two stages, and on one rank.

Options: `sizes` of the model.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from service.spec.layout import Layout
from tests.bench.sides import checkpoint_ranks, limits, program
from tests.megatron_backend.ranks import Ranks


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Saves and loads, and gives the seconds of each."""
    sizes, folder = options["sizes"], case / "ours"
    folder.mkdir()
    ranks = Ranks()
    try:
        saved = ranks.run(Layout(tp=2), checkpoint_ranks.save, Layout(tp=2), sizes, folder)
        written = sum(
            p.stat().st_size for p in (folder / checkpoint_ranks.LAST).rglob("*") if p.is_file()
        )
        loaded = {
            name: ranks.run(layout, checkpoint_ranks.load, layout, sizes, folder)
            for name, layout in (("load pp2", Layout(pp=2)), ("load tp1", Layout()))
        }
    finally:
        ranks.close()
        shutil.rmtree(folder)
    seconds = {kind: max(one[kind] for one in saved) for kind in ("save", "stall", "background")}
    seconds |= {name: max(one["seconds"] for one in some) for name, some in loaded.items()}
    return {
        "seconds": {
            **seconds,
            "write limit": raw_write(case, written),
            "copy limit": written / limits.copy_rate(),
        },
        "bytes": written,
        "sums": [saved[0]["sums"], *(some[0]["sums"] for some in loaded.values())],
    }


def raw_write(case: Path, size: int) -> float:
    """Seconds to write so many bytes to disk, and to have them there."""
    block = os.urandom(1 << 20) * 16
    start = time.perf_counter()
    with (case / "raw").open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.write(block[: size % len(block)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (case / "raw").unlink()
    return seconds


if __name__ == "__main__":
    program.run(work)
