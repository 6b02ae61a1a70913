"""In which order a save reaches the disk.

Only losing power would show that an fsync is missing, so the calls themselves are looked at: each
must come before whatever relies on it (docs/checkpoints.md, "How one is written").
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_backend.driver.recorder import SpoolRecorder
from tests.megatron_backend.driver.saves import Saves


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that puts something on disk, or changes names.

    Attributes:
        path: as it was called at that moment.
        target: its new name, where it got one.
    """

    name: str
    path: Path
    target: Path | None = None


@contextmanager
def watched() -> Iterator[list[Call]]:
    """The calls of this process inside the block, in order."""
    calls: list[Call] = []
    fsync, unlink = os.fsync, os.unlink

    def watch_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(Call("fsync", opened(descriptor)))

    def watch_unlink(path: Path | str, *, dir_fd: int | None = None) -> None:
        calls.append(Call("unlink", Path(path) if dir_fd is None else opened(dir_fd) / path))
        unlink(path, dir_fd=dir_fd)

    def renaming(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def watch(source: Path, target: Path, **options: Any) -> None:
            calls.append(Call(name, Path(source), Path(target)))
            call(source, target, **options)

        return watch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", watch_fsync)
        patch.setattr(os, "unlink", watch_unlink)
        for name in ("rename", "replace"):
            patch.setattr(os, name, renaming(name, getattr(os, name)))
        yield calls


def opened(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def place(calls: list[Call], name: str, holds: Callable[[Call], bool]) -> int:
    """Of the first call that is meant."""
    return next(i for i, call in enumerate(calls) if call.name == name and holds(call))


def synced(calls: list[Call]) -> list[Path]:
    return [call.path for call in calls if call.name == "fsync"]


def test_d01_all_is_on_disk_before_what_relies_on_it(
    open_saves: Callable[..., Saves], spool_recorder: SpoolRecorder
) -> None:
    saves = open_saves(recorder=spool_recorder)
    saves.save(1)
    spool_recorder.record("metrics", {"loss": 0.5}, step=2)
    with watched() as calls:
        saves.save(2)
    root, newest = saves.root, saves.root / "step-00000002"
    events = root.parent / "attempts" / "1" / "events.jsonl"

    published = place(calls, "rename", lambda call: call.target == newest)
    staged = calls[published].path
    first = synced(calls[:published])
    within = [staged / path.relative_to(newest) for path in newest.rglob("*")]
    assert staged / "manifest.json" in within
    assert {*within, staged, events} <= set(first)
    for path in within:  # a name is on disk with its folder
        assert path.parent in first[first.index(path) + 1 :]

    named = place(calls, "replace", lambda call: call.target == root / "latest")
    retired = place(calls, "rename", lambda call: call.path == root / "step-00000001")
    trash = calls[retired].target
    assert trash is not None
    deleted = place(calls, "unlink", lambda call: trash in call.path.parents)
    assert published < named < retired < deleted
    assert calls[named].path in synced(calls[:named])
    for begin, end in ((published, named), (named, retired), (retired, deleted)):
        assert root in synced(calls[begin:end])
