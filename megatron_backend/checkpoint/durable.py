"""Durable writes of whole folders; `service.spec.durable` has those of single files."""

import os
from pathlib import Path

from service.spec.durable import fsync_file


def fsync_tree(folder: Path) -> None:
    """`fsync_file` of everything in a folder and of the folder itself."""
    for directory, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(Path(directory, name))
        fsync_file(Path(directory))


def move(source: Path, target: Path) -> None:
    """Renames within one folder, durably."""
    os.rename(source, target)
    fsync_file(target.parent)
