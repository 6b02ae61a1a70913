"""Reads what an attempt left on disk: its spool of events and the end of its log."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from service.spec import WorkerEvent

_BATCH = 500
_LOG_TAIL_BYTES = 2000


def spooled(path: Path, *, after_seq: int) -> Iterator[tuple[WorkerEvent, ...]]:
    """Batches of the events in a spool with a `seq` greater than `after_seq`.

    Ends before the first line that is no event: a driver that was killed leaves half a line.
    """
    events = _events(path, after_seq)
    while batch := tuple(islice(events, _BATCH)):
        yield batch


def _events(path: Path, after_seq: int) -> Iterator[WorkerEvent]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                event = WorkerEvent.model_validate_json(line)
            except ValidationError:
                return
            if event.seq > after_seq:
                yield event


def last_words(log: Path) -> str:
    """The last lines of a log, 2000 bytes at most; empty where there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
