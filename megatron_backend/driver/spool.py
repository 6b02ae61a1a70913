"""The spool: an attempt's events on disk, one JSON object a line, numbered without a gap.

A line is handed to the operating system before `append` returns, so a killed driver loses none.
`sync` makes them survive a crash of the machine too; it is called before anything that depends on
them (a checkpoint that is published, a push to the service), not for every line.

On a full disk the job goes on, and lines wait in memory. Whoever appends or syncs next writes them
first, so they come out in order. A line is in the file whole or not at all.

Every line stays in memory until it is synced: a kernel that could not write a page (a network file
system learns of a quota no sooner) may drop it, and says so once. After a sync that failed, lines
are therefore written again.
"""

import logging
import os
import threading
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.spec import WorkerEvent
from service.spec.durable import STORAGE_FULL

log = logging.getLogger("planish")

MAX_UNSYNCED_BYTES = 32 * 1024 * 1024
"""Lines beyond this are synced at once; a disk that is still full then is an error."""


class EventSpool:
    """Appends to, and reads from, an attempt's events.jsonl. Safe to share between threads.

    A file that is there already is gone on with: numbering goes on where it ends, and a last line
    that a crash cut is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._offsets = array("Q")  # byte offset of event seq, at index seq - 1
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = self._recover()  # where the next line goes, once those before it are written
        self._synced = self._end
        self._unsynced: list[bytes] = []  # the newest lines, from `_synced` to `_end`
        self._written = 0  # how many of these the operating system has

    @property
    def last_seq(self) -> int:
        """Number of the newest event; 0 where there is none."""
        return len(self._offsets)

    def append(self, kind: str, data: Mapping[str, Any], step: int | None) -> WorkerEvent:
        """Writes one event, or holds it back while the disk is full.

        Raises:
            pydantic.ValidationError: the kind is none of the contract's.
            pydantic_core.PydanticSerializationError: `data` holds what is no JSON value.
            OSError: the disk fails, or has been full for `MAX_UNSYNCED_BYTES`.
        """
        with self._lock:
            event = WorkerEvent.model_validate(
                {
                    "seq": self.last_seq + 1,
                    "time": time.time(),
                    "kind": kind,
                    "step": step,
                    "data": dict(data),
                }
            )
            line = event.model_dump_json().encode() + b"\n"
            self._offsets.append(self._end)
            self._end += len(line)
            self._unsynced.append(line)
            if self._end - self._synced > MAX_UNSYNCED_BYTES:
                self._sync()
            else:
                self._write_if_room()
            return event

    def sync(self) -> None:
        """Returns once every event so far is on disk.

        Raises:
            OSError: the disk fails or is full; the next call tries again.
        """
        with self._lock:
            self._sync()

    def read(self, first: int, *, max_events: int, max_bytes: int) -> list[WorkerEvent]:
        """Events from number `first` on that are in the file; at least one where there is one."""
        with self._lock:
            stop = min(self._last_written, first - 1 + max_events)
            if first > stop:
                return []
            begin = self._offsets[first - 1]
            while stop > first and self._start_of(stop + 1) - begin > max_bytes:
                stop -= 1
            block = os.pread(self._file, self._start_of(stop + 1) - begin, begin)
        return [WorkerEvent.model_validate_json(line) for line in block.splitlines()]

    def close(self) -> None:
        """Syncs and lets go of the file, even where it cannot be synced."""
        try:
            self.sync()
        finally:
            os.close(self._file)

    @property
    def _last_written(self) -> int:
        return self.last_seq - len(self._unsynced) + self._written

    def _write_if_room(self) -> None:
        try:
            self._write()
        except OSError as error:
            if error.errno not in STORAGE_FULL:
                raise
            if self._last_written == self.last_seq - 1:  # the first one, so it is said once
                log.warning("events wait in memory until there is room: %s", error)

    def _write(self) -> None:
        """Hands the operating system the lines that it does not have."""
        while self._written < len(self._unsynced):
            line, start = self._unsynced[self._written], self._start_of(self._last_written + 1)
            done = 0
            try:
                while done < len(line):
                    done += os.pwrite(self._file, line[done:], start + done)
            except OSError:
                os.ftruncate(self._file, start)
                raise
            self._written += 1

    def _sync(self) -> None:
        self._write()
        if not self._unsynced:
            return
        try:
            os.fsync(self._file)
        except OSError:
            self._written = 0
            raise
        self._unsynced.clear()
        self._written, self._synced = 0, self._end

    def _start_of(self, seq: int) -> int:
        return self._offsets[seq - 1] if seq <= self.last_seq else self._end

    def _recover(self) -> int:
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                event = WorkerEvent.model_validate_json(line)
                if event.seq != self.last_seq + 1:
                    raise ValueError(
                        f"the event spool jumps from {self.last_seq} to {event.seq}: it was edited"
                    )
                self._offsets.append(end)
                end += len(line)
        os.ftruncate(self._file, end)
        return end
