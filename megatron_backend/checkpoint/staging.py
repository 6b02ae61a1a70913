"""Where a rank's part of a checkpoint goes: straight to disk, or into memory first.

A save that training waits for writes its files at once (`DirectFiles`). One that it does not wait
for copies everything once, into memory without a name (`StagedFiles`), and a process of its own
writes that to disk (`megatron_backend.checkpoint.flush`) while this one trains on. A process and
not a thread: a thread would share the interpreter's lock with training, and a process that is
killed, or that hangs on a dead file server, takes nothing with it.

The memory is kept from save to save, since the first touch of each of its pages costs as much as
the copy itself. It is as large as the rank's part of a checkpoint. It also holds what was written
last, so a write that failed is tried again without asking the model for anything.

Free of torch.
"""

import io
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_backend.checkpoint.hashed_file import FileEntry, open_hashed

_GROWTH = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What became of a rank's files: `files` are on disk, or `error` says why they are not."""

    files: Mapping[str, FileEntry]
    error: OSError | None = None


class Files(Protocol):
    """Takes new files, one after another."""

    def open(self, name: str) -> Any:
        """A context manager: a binary file for writing. `name` is a path inside the checkpoint."""
        ...


class DirectFiles:
    """Files of a folder.

    Attributes:
        entries: size and hash of each file that is on disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[io.BufferedIOBase]:
        """A new file; on disk when the block ends.

        Raises:
            OSError: the storage refuses.
        """
        file = open_hashed(self._folder / name)
        with file:
            yield file
        self.entries[name] = file.entry


class StagedFiles:
    """Files in memory, and the process that writes them to disk."""

    def __init__(self) -> None:
        self._descriptor = -1  # made when it is first needed, since that can fail
        self._memory: mmap.mmap | None = None
        self._files: list[tuple[str, int, int]] = []
        self._end = 0
        self._flush: subprocess.Popen[bytes] | None = None
        self._result: Written | None = None

    def reset(self, expected: int) -> None:
        """Forgets what was staged; the memory stays, and grows to `expected` bytes if need be.

        Raises:
            OSError: there is no such memory; a later call may find it.
        """
        self.abandon()
        self._files.clear()
        self._end = 0
        self._reserve(expected)

    @contextmanager
    def open(self, name: str) -> Iterator["_StagedFile"]:
        """A new file in memory."""
        start = self._end
        yield _StagedFile(self, start)
        self._files.append((name, start, self._end - start))

    def append(self, data: Any) -> int:
        """Copies data behind what is there."""
        with memoryview(data).cast("B") as view:
            self._reserve(self._end + len(view))
            assert self._memory is not None
            self._memory[self._end : self._end + len(view)] = view
            self._end += len(view)
            return len(view)

    @property
    def size(self) -> int:
        """Bytes staged so far."""
        return self._end

    def flush(self, folder: Path) -> None:
        """Starts to write all files into a folder; `result` tells how it went."""
        self.abandon()
        command = [sys.executable, "-m", "megatron_backend.checkpoint.flush"]
        command += [str(self._descriptor), str(os.getpid()), str(folder)]
        try:
            self._flush = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self._descriptor,),
            )
        except OSError as error:  # no memory, or no process to be had
            self._result = Written(files={}, error=error)
            return
        assert self._flush.stdin is not None
        with suppress(BrokenPipeError):  # it died already; `result` says so
            self._flush.stdin.write(json.dumps(self._files).encode())
            self._flush.stdin.close()

    def result(self, *, wait: bool) -> Written | None:
        """How the newest `flush` went; None while it writes, unless `wait` says to wait for it.

        A process that was killed counts as a failure of the storage, and can be tried again.
        """
        if self._result is None:
            if self._flush is None:
                raise RuntimeError("nothing was flushed")
            if wait or self._flush.poll() is not None:
                self._result = _answer(self._flush)
        return self._result

    def abandon(self) -> None:
        """Ends a flush that is under way."""
        if self._flush is not None:
            self._flush.kill()
            self._flush.wait()
            for pipe in (self._flush.stdin, self._flush.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._flush = None
        self._result = None

    def close(self) -> None:
        """Ends a flush and gives the memory back."""
        self.abandon()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _reserve(self, size: int) -> None:
        have = 0 if self._memory is None else len(self._memory)
        if size <= have:
            return
        size = -(-size // _GROWTH) * _GROWTH
        if self._descriptor < 0:
            self._descriptor = os.memfd_create("planish-checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)
        if self._memory is not None:
            self._memory.close()
            self._memory = None  # the next line may fail
        self._memory = mmap.mmap(self._descriptor, size)


class _StagedFile(io.RawIOBase):
    """One file of `StagedFiles`."""

    def __init__(self, files: StagedFiles, start: int) -> None:
        self._files, self._start = files, start

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._files.append(data)

    def tell(self) -> int:
        return self._files.size - self._start


def _answer(flush: subprocess.Popen[bytes]) -> Written:
    """What a flush says at its end, which is waited for."""
    assert flush.stdout is not None
    answer = flush.stdout.read()
    code = flush.wait()
    if code != 0:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        lost = OSError(f"the process that writes this rank's checkpoint ended with {how}")
        return Written(files={}, error=lost)
    document = json.loads(answer)
    if "error" in document:
        return Written(files={}, error=OSError(*document["error"]))
    return Written(files={n: FileEntry(**entry) for n, entry in document["files"].items()})
