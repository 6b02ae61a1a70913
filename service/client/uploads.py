"""A file that tells how much of it was read."""

from collections.abc import Callable
from typing import BinaryIO


class Reading:
    """Reads `file` and tells `on_progress` (bytes read, bytes in all)."""

    def __init__(
        self, file: BinaryIO, size: int, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self._file = file
        self._size = size
        self._on_progress = on_progress
        self._done = 0

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes."""
        data = self._file.read(size)
        self._done += len(data)
        if self._on_progress is not None:
            self._on_progress(self._done, self._size)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of the file; httpx finds its length this way."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As of the file."""
        return self._file.tell()

    def fileno(self) -> int:
        """As of the file."""
        return self._file.fileno()
