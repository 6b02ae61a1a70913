"""Unpacks a downloaded export: beside its place first, then by one rename."""

import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from io import RawIOBase
from pathlib import Path


class _Body(RawIOBase):
    """The pieces of an answer as a file."""

    def __init__(
        self, pieces: Iterator[bytes], size: int, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self._pieces = pieces
        self._size = size
        self._on_progress = on_progress
        self._done = 0
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Exactly `size` bytes, fewer at the end."""
        parts, held = [self._rest], len(self._rest)
        while size < 0 or held < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            parts.append(piece)
            held += len(piece)
            self._done += len(piece)
            if self._on_progress is not None:
                self._on_progress(self._done, self._size)
        data = b"".join(parts)
        cut = len(data) if size < 0 else size
        self._rest = data[cut:]
        return data[:cut]


def unpack(
    pieces: Iterator[bytes],
    size: int,
    to: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes the files of a tar stream, which are all in one folder of it, into the folder `to`.

    Raises:
        FileExistsError: `to` is there and not empty.
        tarfile.TarError: the stream is no such archive, or holds a path that leads outside.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} is there already; name a new or an empty folder")
    to.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        body = _Body(pieces, size, on_progress)
        with tarfile.open(fileobj=body, mode="r|") as archive:
            # "data" refuses absolute paths, `..`, links to the outside and devices.
            archive.extractall(fresh, filter="data")
        body.read()  # to the end, so that an answer that was cut off is noticed
        folders = list(fresh.iterdir())
        if len(folders) != 1 or not folders[0].is_dir():
            raise tarfile.TarError("the archive does not hold one folder")
        if to.exists():
            to.rmdir()
        folders[0].rename(to)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return sorted(path for path in to.rglob("*") if path.is_file())
