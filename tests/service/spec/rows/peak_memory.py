"""Prints, as JSON, the bytes that reading each file of the command line takes at its peak.

In a process of its own: what is counted is all that Python allocates, so the threads of a service
that other tests share would be counted too.
"""

import json
import sys
import tracemalloc
from pathlib import Path

from service.spec.rows import RowFile


def peak(path: Path) -> int:
    """Bytes at the peak, of what is allocated from the first row to the last."""
    tracemalloc.start()
    for _ in RowFile(path):
        pass
    reached = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return reached


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]]
    for _ in RowFile(paths[0]):  # what is imported or made once is no part of it
        pass
    json.dump([peak(path) for path in paths], sys.stdout)
