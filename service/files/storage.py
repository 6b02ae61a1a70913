"""Where uploaded bytes lie: `files_dir/ID`, and `files_dir/.incoming-*` while they arrive.

The name a user gives never becomes a path. A file appears under its id by one rename, after its
bytes are on disk; a row in the store is written after that. A crash between the two leaves bytes
that nobody refers to, which `sweep` removes at the next start, never a row without bytes.
"""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

FILE_ID = re.compile(r"file-[a-z0-9]{16,32}")
INCOMING_PREFIX = ".incoming-"
# No upload takes longer; younger ones may belong to another process of the service.
ABANDONED_SECONDS = 24 * 3600.0


class UploadTooLarge(Exception):
    """More bytes arrived than a file may have."""


@dataclass(frozen=True, slots=True)
class StoredContent:
    """What was written."""

    bytes: int
    sha256: str
    """Hex digest of the whole content."""


class IncomingFile:
    """A file that is arriving. Leaving its `with` block without `publish` removes it."""

    def __init__(self, root: Path, limit: int) -> None:
        self.path = root / f"{INCOMING_PREFIX}{secrets.token_hex(16)}"
        self._root = root
        self._limit = limit
        self._digest = hashlib.sha256()
        self._bytes = 0
        # "x": a file or link that is already there is never followed or overwritten.
        self._file = self.path.open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a full disk fails once more, for what is thrown away now
            self._file.close()
        self.path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Appends bytes.

        Raises:
            UploadTooLarge: the limit is passed.
        """
        self._bytes += len(data)
        if self._bytes > self._limit:
            raise UploadTooLarge(f"the file is larger than {self._limit} bytes")
        self._digest.update(data)
        self._file.write(data)

    def finish(self) -> StoredContent:
        """Puts all bytes on disk, still under the temporary name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return StoredContent(bytes=self._bytes, sha256=self._digest.hexdigest())

    def publish(self, file_id: str) -> Path:
        """Gives the finished file its place.

        Raises:
            FileExistsError: the id is taken.
        """
        place = content_path(self._root, file_id)
        # A hard link, unlike a rename, fails where the name is taken (by a symlink, too).
        os.link(self.path, place)
        self.path.unlink()
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return place


def content_path(root: Path, file_id: str) -> Path:
    """Where the content of a file lies.

    Raises:
        ValueError: `file_id` is not of the form that this service makes.
    """
    if not FILE_ID.fullmatch(file_id):
        raise ValueError(f"{file_id!r} is no file id")
    return root / file_id


def receive(root: Path, *, limit: int) -> IncomingFile:
    """Opens a place for a file that is arriving, of at most `limit` bytes."""
    root.mkdir(parents=True, exist_ok=True)
    return IncomingFile(root, limit)


def sweep(root: Path, known: Collection[str]) -> list[str]:
    """Removes what a crash left behind: old arrivals, and content that no row refers to.

    Returns:
        The names that were removed.
    """
    if not root.is_dir():
        return []
    before = time.time() - ABANDONED_SECONDS
    removed = []
    with os.scandir(root) as entries:
        for entry in entries:
            ours = entry.name.startswith(INCOMING_PREFIX) or FILE_ID.fullmatch(entry.name)
            if not ours or entry.name in known:
                continue
            with suppress(FileNotFoundError):  # another process of the service took it meanwhile
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)
                    removed.append(entry.name)
    return removed
