"""A file that is hashed while it is written, and on disk when it is closed.

Imports the standard library only: a process is started for each save in the background, beside
ranks that train.
"""

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITEBACK_BYTES = 16 * 1024 * 1024
BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of one file."""

    size: int
    sha256: str


class HashedFile(io.RawIOBase):
    """A new file, for writing from start to end.

    The kernel is asked now and then to begin with the disk's part of the work, so that the fsync at
    the end finds most of it done: writing, hashing and the disk then overlap.

    Attributes:
        entry: size and SHA-256 of what was written; complete once the file is closed.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1  # for `close`, which runs even if there is no file
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digest = hashlib.sha256()
        self._size = self._begun = 0

    @property
    def entry(self) -> FileEntry:
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        """Writes some of `data`, and says how much.

        Raises:
            OSError: the disk is full, the quota is used up, ...
        """
        with memoryview(data).cast("B") as view:
            count = os.write(self._descriptor, view[:WRITEBACK_BYTES])
            self._digest.update(view[:count])
        self._size += count
        if self._size - self._begun >= WRITEBACK_BYTES:
            # "Not needed any more" also starts the writing of pages that are still dirty.
            os.posix_fadvise(
                self._descriptor, self._begun, self._size - self._begun, os.POSIX_FADV_DONTNEED
            )
            self._begun = self._size
        return count

    def close(self) -> None:
        """Returns once everything is on disk."""
        descriptor, self._descriptor = self._descriptor, -1
        super().close()
        if descriptor >= 0:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def open_hashed(path: Path) -> "BufferedHashedFile":
    """A new file for many small and some large writes."""
    return BufferedHashedFile(HashedFile(path))


class BufferedHashedFile(io.BufferedWriter):
    """A `HashedFile` behind a buffer; large writes pass it by."""

    def __init__(self, file: HashedFile) -> None:
        super().__init__(file, BUFFER_BYTES)
        self._file = file

    @property
    def entry(self) -> FileEntry:
        """Size and SHA-256, once the file is closed."""
        return self._file.entry
