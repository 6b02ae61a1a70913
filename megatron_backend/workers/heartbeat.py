"""What a rank is doing, told by a thread beside the one that works.

A call that takes too long says nothing: ranks wait for each other in collectives, so one that is
stuck makes all of them look stuck. The thread here looks at the working thread's stack now and
then, and knows two things that tell them apart:

- whether it waits for other ranks (its innermost frame is torch's collectives, or a `.wait()`), or
  is at something of its own;
- how much of a call it spent waiting. The rest is the rank's own time, in which it may be slower
  than the others (`stragglers`).

On a GPU the host waits for kernels, and kernels for other ranks, so a rank at something of its own
may still wait for another; then no rank is told from the others.
"""

import linecache
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SAMPLE_SECONDS = 0.05
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One look at a rank.

    Attributes:
        method: the call it is in; None between calls.
        seconds: since that call began.
        waiting: it waits for other ranks.
        place: the line of code it is at, as `file:line in function`.
    """

    method: str | None
    seconds: float
    waiting: bool
    place: str

    def __str__(self) -> str:
        if self.method is None:
            return "is between two calls"
        doing = "waits for other ranks" if self.waiting else "is at work"
        return f"has been in {self.method} for {self.seconds:.0f} s and {doing} ({self.place})"


@dataclass(slots=True)
class Call:
    """A call that is under way, or is over."""

    method: str
    thread: int
    began: float
    waited: float = 0.0
    seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """How long the rank was at something of its own."""
        return max(0.0, self.seconds - self.waited)


class Heartbeat:
    """Watches the calls of one process."""

    def __init__(self) -> None:
        self._call: Call | None = None
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @contextmanager
    def watching(self, method: str) -> Iterator[Call]:
        """The block is a call of that name, in this thread."""
        call = Call(method, threading.get_ident(), time.monotonic())
        self._call = call
        try:
            yield call
        finally:
            self._call = None
            call.seconds = time.monotonic() - call.began

    def beat(self) -> Beat:
        """What the working thread does now; call it from another one."""
        call = self._call
        frame = None if call is None else sys._current_frames().get(call.thread)
        if call is None or frame is None:
            return Beat(method=None, seconds=0.0, waiting=False, place="")
        return Beat(
            method=call.method,
            seconds=time.monotonic() - call.began,
            waiting=waits(frame),
            place=_place(frame),
        )

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(SAMPLE_SECONDS)
            now, call = time.monotonic(), self._call
            frame = None if call is None else sys._current_frames().get(call.thread)
            if call is not None and frame is not None and waits(frame):
                call.waited += now - max(before, call.began)
            before = now


def waits(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame waits for other ranks."""
    path = frame.f_code.co_filename
    return path.endswith(_COLLECTIVES) or ".wait(" in _line(frame)


def _line(frame: FrameType) -> str:
    # Between two lines of its code a frame that another thread looks at may have no number.
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
