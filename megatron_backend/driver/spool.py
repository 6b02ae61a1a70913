"""The spool: an attempt's events on disk, one JSON object a line, numbered without a gap.

A line is handed to the operating system before `append` returns, so a killed driver loses none.
`sync` makes them survive a crash of the machine too; it is called before anything that depends on
them (a checkpoint that is published, a push to the service), not for every line.
"""

import os
import threading
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.spec import WorkerEvent


class EventSpool:
    """Appends to, and reads from, an attempt's events.jsonl. Safe to share between threads.

    A file that is there already is gone on with: numbering goes on where it ends, and a last line
    that a crash cut is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._offsets = array("Q")  # byte offset of event seq, at index seq - 1
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = self._recover()
        self._synced = self._end

    @property
    def last_seq(self) -> int:
        """Number of the newest event; 0 where there is none."""
        return len(self._offsets)

    def append(self, kind: str, data: Mapping[str, Any], step: int | None) -> WorkerEvent:
        """Writes one event.

        Raises:
            pydantic.ValidationError: the kind is none of the contract's.
            pydantic_core.PydanticSerializationError: `data` holds what is no JSON value.
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
            written = 0
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._end + written)
            self._offsets.append(self._end)
            self._end += len(line)
            return event

    def sync(self) -> None:
        """Returns once every event so far is on disk."""
        with self._lock:
            if self._synced < self._end:
                os.fsync(self._file)
                self._synced = self._end

    def read(self, first: int, *, max_events: int, max_bytes: int) -> list[WorkerEvent]:
        """Events from number `first` on; at least one where there is one."""
        with self._lock:
            stop = min(self.last_seq, first - 1 + max_events)
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
