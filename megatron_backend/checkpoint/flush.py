"""The process that writes a rank's staged files to disk; see `staging`.

    python -m megatron_backend.checkpoint.flush DESCRIPTOR PARENT FOLDER < FILES

DESCRIPTOR is the memory that the files are in, PARENT the process that it is of: when that one is
gone, so is the job's attempt, and what this one writes is in nobody's interest. FILES is JSON, a
list of [name, first byte, bytes]. The answer on stdout is JSON too: {"files": {name: {size,
sha256}}} once everything is on disk, or {"error": [errno, message, path]}.
"""

import json
import mmap
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_backend.checkpoint.hashed_file import WRITEBACK_BYTES, open_hashed


def main() -> None:
    descriptor, parent, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    files: list[tuple[str, int, int]] = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        answer = {"files": _write(descriptor, parent, folder, files)}
    except OSError as error:
        answer = {"error": [error.errno, error.strerror, error.filename or str(folder)]}
    json.dump(answer, sys.stdout)


def _write(
    descriptor: int, parent: int, folder: Path, files: list[tuple[str, int, int]]
) -> dict[str, Any]:
    entries = {}
    memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    for name, start, length in files:
        file = open_hashed(folder / name)
        with file:
            for place in range(start, start + length, WRITEBACK_BYTES):
                if os.getppid() != parent:
                    sys.exit("the rank is gone")
                file.write(memory[place : min(place + WRITEBACK_BYTES, start + length)])
        entries[name] = asdict(file.entry)
    return entries


if __name__ == "__main__":
    main()
