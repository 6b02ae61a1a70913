"""Who is told how the reconciler gets on: its rounds, and how clusters answer.

The reconciler knows nothing of metrics; the service hands it something that counts.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

Call = Literal["submit", "poll", "cancel"]


class Observer(Protocol):
    """Takes what is told; must return at once and not raise."""

    def round_done(self, seconds: float) -> None:
        """A round over all jobs took so long."""

    def called(self, cluster: str, call: Call, seconds: float, error: Exception | None) -> None:
        """A call to a cluster's launcher took so long, and raised `error` if it did."""

    def left_queue(self, cluster: str, seconds: float) -> None:
        """A job got its first place so long after it was submitted."""


class Nobody:
    """An observer who does not care."""

    def round_done(self, seconds: float) -> None:
        """See `Observer`."""

    def called(self, cluster: str, call: Call, seconds: float, error: Exception | None) -> None:
        """See `Observer`."""

    def left_queue(self, cluster: str, seconds: float) -> None:
        """See `Observer`."""


@contextmanager
def calling(observer: Observer, cluster: str, call: Call) -> Iterator[None]:
    """Times the call that it is wrapped around, and tells how it went."""
    started = time.perf_counter()
    try:
        yield
    except Exception as error:
        observer.called(cluster, call, time.perf_counter() - started, error)
        raise
    observer.called(cluster, call, time.perf_counter() - started, None)
