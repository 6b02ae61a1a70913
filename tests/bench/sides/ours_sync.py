"""Our weight sync from two tensor-parallel ranks to a generator's process.

Options: `sizes` of the model.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from service.spec.layout import Layout
from tests.bench.sides import limits, program, sync_ranks
from tests.megatron_backend.ranks import Ranks
from tests.ports import free_port


def work(_case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The fastest of the syncs after the first, which makes the plan."""
    sizes, layout, port = options["sizes"], Layout(tp=2), free_port()
    trainers, generators = Ranks(), Ranks()
    try:
        with ThreadPoolExecutor(2) as threads:
            sent = threads.submit(trainers.run, layout, sync_ranks.send, layout, sizes, port)
            [taken] = threads.submit(
                generators.run, Layout(), sync_ranks.take, sizes, port
            ).result()
            sent.result()
    finally:
        trainers.close()
        generators.close()
    return {
        "seconds": {
            "sync": min(taken["seconds"][1:]),
            "first": taken["seconds"][0],
            "limit": taken["bytes"] / limits.copy_rate(),
        },
        "bytes": taken["bytes"],
        "right": taken["right"],
    }


if __name__ == "__main__":
    program.run(work)
