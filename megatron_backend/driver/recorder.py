"""The driver's `Recorder`: events go to the spool, to the service, and as lines to the log.

When ranks are started anew inside an attempt, steps since the last checkpoint are taken a second
time. Their events are in the record already, so a replay leaves out as many events of a kind and
step as there were before. So each step is told once, as if nothing had happened.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_backend.checkpoint.fence import StaleAttempt
from megatron_backend.driver.push import Pusher
from megatron_backend.driver.spool import EventSpool
from service.spec import WorkerEvent
from service.spec.attempt import attempt_path

log = logging.getLogger("planish")

FLUSH_SECONDS = 5.0
_OF_STEPS = frozenset({"metrics", "evaluation", "sample", "warning"})
"""Kinds of which the loop records the same ones each time it takes a step."""


class SpoolRecorder:
    """Implements `algorithms.protocols.Recorder` for one attempt."""

    def __init__(
        self,
        job_dir: Path,
        *,
        job_id: str,
        attempt: int,
        on_event: Callable[[WorkerEvent], None] = lambda _: None,
    ) -> None:
        """Opens the attempt's spool and begins to push.

        Args:
            job_dir: the job's folder.
            job_id: of the job.
            attempt: its number.
            on_event: is told each event once it is spooled; it must return at once and not raise.
        """
        self._on_event = on_event
        self._spool = EventSpool(attempt_path(job_dir, attempt) / "events.jsonl")
        self._pusher = Pusher(self._spool, job_dir=job_dir, job_id=job_id, attempt=attempt)
        self._pusher.start()
        self._saved_step = 0
        self._recorded: Counter[tuple[str, int]] = Counter()
        self._replayed: Counter[tuple[str, int]] = Counter()

    def record(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> None:
        """Writes one event; a killed driver does not lose it. Does not wait for the service.

        While the disk is full the event waits in memory, see `EventSpool`.

        Raises:
            StaleAttempt: the service has said that a newer attempt has taken over.
            OSError: the disk fails, or is full and too much waits.
        """
        if self._pusher.stale.is_set():
            raise StaleAttempt("the service says that a newer attempt of this job has taken over")
        if step is not None and kind in _OF_STEPS and self._was_recorded(kind, step):
            return
        if step is not None and kind == "checkpoint":
            self._forget(step)
        event = self._spool.append(kind, data, step)
        self._pusher.wake()
        self._on_event(event)
        log.log(*_line(event))

    def replay(self) -> None:
        """From here on, steps that were recorded may be taken again."""
        self._replayed = self._recorded.copy()

    def _was_recorded(self, kind: str, step: int) -> bool:
        if self._replayed[kind, step]:
            self._replayed[kind, step] -= 1
            return True
        self._recorded[kind, step] += 1
        return False

    def _forget(self, saved_step: int) -> None:
        """Steps before the last checkpoint but one are not taken again."""
        for key in [key for key in self._recorded if key[1] <= self._saved_step]:
            del self._recorded[key]
        self._saved_step = saved_step

    def sync(self) -> None:
        """Returns once every event so far would survive a crash of the machine."""
        self._spool.sync()

    def close(self) -> None:
        """Syncs, tries for a few seconds to hand the rest to the service, and lets go."""
        try:
            self._spool.sync()
        finally:
            try:
                taken = self._pusher.stop(flush_seconds=FLUSH_SECONDS)
            finally:
                self._spool.close()
        if not taken:
            log.warning("the service did not take the last events; it will find them in the spool")


def _line(event: WorkerEvent) -> tuple[int, str]:
    """Level and text of an event's line in the log."""
    level = {"warning": logging.WARNING, "progress": logging.DEBUG}.get(event.kind, logging.INFO)
    place = "" if event.step is None else f"step {event.step} "
    if event.kind == "sample":
        return logging.DEBUG, f"{place}sample"
    return level, f"{place}{event.kind}: " + ", ".join(
        f"{name} {_short(value)}" for name, value in event.data.items()
    )


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
