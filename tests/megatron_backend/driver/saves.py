"""A job's checkpoints as its driver sees them: the ranks' state is some bytes; files, processes,
storage and errors are real ones.
"""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.staging import DirectFiles, StagedFiles, Written
from megatron_backend.driver.checkpoints import JobCheckpoints
from megatron_backend.driver.job import open_job
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.driver.start import open_start
from tests.algorithms.tiny_policy import EventList
from tests.megatron_backend.driver import tiny_job

SIZE = 300_000


class SyncedEvents(EventList):
    """A recorder whose events need no disk."""

    def sync(self) -> None:
        """Nothing can be lost."""


class FileGroup:
    """Two ranks whose state is some bytes."""

    def __init__(self) -> None:
        self.state = b""
        self.loaded: list[bytes] = []
        self._memory = [StagedFiles(), StagedFiles()]

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [getattr(self, method.__name__)(rank, *args) for rank in range(2)]

    def begin_save(self, rank: int, staged: str, background: bool) -> Written | None:
        name = f"state/__{rank}_0.distcp"
        if background:
            memory = self._memory[rank]
            try:
                memory.reset(len(self.state))
            except OSError as error:
                return Written(files={}, error=error)
            with memory.open(name) as copy:
                copy.write(self.state)
            memory.flush(Path(staged))
            return None
        files = DirectFiles(Path(staged))
        try:
            with files.open(name) as file:
                file.write(self.state)
        except OSError as error:
            return Written(files={}, error=error)
        return Written(files=files.entries)

    def save_again(self, rank: int, staged: str) -> None:
        self._memory[rank].flush(Path(staged))

    def save_result(self, rank: int, wait: bool) -> Written | None:
        return self._memory[rank].result(wait=wait)

    def load_state(self, rank: int, checkpoint: str, same_layout: bool) -> None:
        assert same_layout
        self.loaded.append(Path(checkpoint, "state", f"__{rank}_0.distcp").read_bytes())

    def close(self) -> None:
        for memory in self._memory:
            memory.close()


class Saves:
    """A job's checkpoints, with what they tell.

    Attributes:
        events: what they tell, where it goes to no `recorder`.
    """

    def __init__(
        self,
        folder: Path,
        attempt: int = 1,
        *,
        recorder: SpoolRecorder | None = None,
        **spec: Any,
    ) -> None:
        if not folder.exists():
            tiny_job.write_job(folder, checkpoint=spec, parallel={"tp": 2})
        self.root = folder / "checkpoints"
        job = open_job(folder, attempt)
        fence = Fence(folder, attempt)
        fence.take()
        self.events, self.group = SyncedEvents(), FileGroup()
        taker = recorder or self.events
        start = open_start(job, fence, lambda text: taker.record("warning", {"message": text}))
        self.checkpoints = JobCheckpoints(job, start, self.group, taker)  # type: ignore[arg-type]

    def save(self, step: int, **options: Any) -> None:
        self.group.state = bytes([step]) * SIZE
        self.checkpoints.save(step, {"step": step}, **options)

    def latest(self) -> str:
        return (self.root / "latest").read_text().strip()

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.root.glob("step-*"))

    def resumed(self) -> int | None:
        """The step that `load_latest` gives, after a look at the state that comes with it."""
        state = self.checkpoints.load_latest()
        if state is None:
            return None
        step = int(state["step"])
        assert self.group.loaded[-2:] == [bytes([step]) * SIZE] * 2
        return step


@contextmanager
def small_files() -> Iterator[None]:
    """The kernel refuses files of more than 100 kB to this process and its children."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_room_for_events() -> Iterator[None]:
    """The disk takes all but the end of an event's line."""
    whole = os.pwrite

    def most(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) > 10:
            return whole(descriptor, data[:-10], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", most)
        yield


def drained(saves: Saves, step: int) -> None:
    """A save, to its end."""
    saves.save(step)
    saves.checkpoints.drain()


def flushes() -> list[psutil.Process]:
    """The processes that write staged files of this one."""
    return children("megatron_backend.checkpoint.flush")


def children(module: str) -> list[psutil.Process]:
    """The processes of this one that run a module."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie, which has no command line any more
            if module in child.cmdline():
                found.append(child)
    return found
