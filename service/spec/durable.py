"""Writing so that a crash of the process or of the machine leaves the old or the new, whole."""

import errno
import os
import secrets
from pathlib import Path

STORAGE_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that pass once somebody makes room."""


def fsync_file(path: Path) -> None:
    """Returns once a file's contents, or a folder's list of names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folders(folder: Path) -> None:
    """`fsync_file` of a folder and of every folder in it, whose files are on disk already."""
    for directory, _, _ in os.walk(folder, topdown=False):
        fsync_file(Path(directory))


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes a new file and returns once it is on disk (its name in the folder is not yet)."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Gives a file new contents in one atomic step, durably."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        write_text(fresh, text)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    fsync_file(path.parent)
