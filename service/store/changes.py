"""A bell inside this process: it rings after a transaction changed a job.

It only saves waiting. Whoever listens must look at the store from time to time as well, since
another process may have written, and must look once after subscribing.
"""

import threading
from collections.abc import Callable

Listener = Callable[[str], None]


class Changes:
    """Tells subscribers the id of each job that has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[int, Listener] = {}
        self._next = 0

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(job_id)` after each change, in the thread that made it.

        It must return at once and not raise; from asyncio, pass
        `lambda _: loop.call_soon_threadsafe(event.set)`.

        Returns:
            A function that ends the subscription.
        """
        with self._lock:
            key = self._next
            self._next += 1
            self._listeners[key] = listener

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return unsubscribe

    def ring(self, job_id: str) -> None:
        """Tells all subscribers; called by the store after its commit."""
        with self._lock:
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener(job_id)
