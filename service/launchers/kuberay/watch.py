"""What the API server has, kept up to date by watching instead of asking.

One thread for each kind of object lists once, then follows the stream of changes from the version
of that list. The server ends each stream after a while; the next goes on from the newest version
that was seen (bookmarks keep it new where nothing happens), so nothing is missed. Where the server
has forgotten that version (410 Gone) it lists again.

What is kept here can be stale: a connection can be dead for a while before anybody knows. `fresh`
tells; who wants to be sure asks the server.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from service.launchers.kuberay.client import Api, Gone, Refused
from service.launchers.protocol import LauncherUnavailable

_log = logging.getLogger(__name__)

STREAM_SECONDS = 20
"""A stream's length; each new one shows that the server is there."""
FRESH_SECONDS = 30.0
_BETWEEN_STREAMS_SECONDS = 0.2
"""A server that ends every stream at once is not asked more often than this."""
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a watch fares."""

    heard_at: float | None
    """`time.monotonic()` when the server last said anything; null before that."""
    lists: int
    """How often it listed: once, and once more for each 410 or answer that was not understood."""
    failures: int
    """How often the server was not there, refused, or was not understood."""


class Watch:
    """A copy of all objects of one kind with the given labels."""

    def __init__(self, api: Api, kind: str, selector: str) -> None:
        """Nothing is read before `start`.

        Args:
            api: the namespace.
            kind: `rayjobs` or `pods`.
            selector: of labels.
        """
        self._api = api
        self._kind = kind
        self._selector = selector
        self._lock = threading.Lock()
        self._objects: dict[str, dict[str, Any]] = {}
        self._heard_at: float | None = None
        self._lists = 0
        self._failures = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.on_change: Callable[[Mapping[str, Any]], None] = _ignore
        """Called in the watch's thread with each object that came, changed or went."""

    def start(self) -> None:
        """Begins to watch; does nothing the second time."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(
                    target=self._run, name=f"watch-{self._kind}", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Ends it: at once where the `Api` is closed next, or at the end of its stream."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Waits for the end of its thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def fresh(self) -> bool:
        """Whether the copy is as of a moment ago."""
        heard_at = self._heard_at
        return heard_at is not None and time.monotonic() - heard_at < FRESH_SECONDS

    @property
    def health(self) -> Health:
        """How it fares."""
        return Health(heard_at=self._heard_at, lists=self._lists, failures=self._failures)

    def get(self, name: str) -> dict[str, Any] | None:
        """The object of that name; null where the copy has none."""
        with self._lock:
            return self._objects.get(name)

    def labelled(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """All objects with these labels."""
        with self._lock:
            return [
                found
                for found in self._objects.values()
                if labels.items() <= (found["metadata"].get("labels") or {}).items()
            ]

    def _run(self) -> None:
        version: str | None = None
        failed = 0
        while not self._stopping.is_set():
            try:
                if version is None:
                    version = self._list()
                version = self._follow(version)
                failed = 0
                self._stopping.wait(_BETWEEN_STREAMS_SECONDS)
            except Gone:
                _log.info("the history of %s is gone; they are listed again", self._kind)
                version = None
            except (LauncherUnavailable, Refused) as error:
                if self._stopping.is_set():
                    return
                if not failed:
                    _log.warning("the watch of %s broke and is tried again: %s", self._kind, error)
                failed = self._pause(failed)
            except Exception:
                # A reader whose connection is closed over TLS may get bytes that make no sense.
                if self._stopping.is_set():
                    return
                # A kubeconfig that is half written, an answer of something that is no API server:
                # without this thread nobody would hear of any object again.
                _log.exception("the watch of %s broke and begins anew", self._kind)
                version = None
                failed = self._pause(failed)

    def _pause(self, failed: int) -> int:
        """Waits after a failure, longer after each; how many there were in a row."""
        self._failures += 1
        self._stopping.wait(_PAUSES[min(failed, len(_PAUSES) - 1)])
        return failed + 1

    def _list(self) -> str:
        method = {"rayjobs": self._api.rayjobs, "pods": self._api.pods}[self._kind]
        found = method(self._selector)
        with self._lock:
            self._objects = {each["metadata"]["name"]: each for each in found["items"]}
        self._lists += 1
        self._heard_at = time.monotonic()
        for each in found["items"]:
            self._tell(each)
        return str(found["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> str:
        """Takes in one stream; returns the newest version that was seen."""
        stream = self._api.watch(self._kind, self._selector, version, seconds=STREAM_SECONDS)
        for event in stream:
            if self._stopping.is_set():
                break
            self._take(event["type"], event["object"])
            version = event["object"]["metadata"]["resourceVersion"]
            self._heard_at = time.monotonic()
        # It ended as it should: the server was there all the time.
        self._heard_at = time.monotonic()
        return version

    def _take(self, type_: str, found: dict[str, Any]) -> None:
        if type_ == "BOOKMARK":
            return
        with self._lock:
            if type_ == "DELETED":
                self._objects.pop(found["metadata"]["name"], None)
            else:
                self._objects[found["metadata"]["name"]] = found
        self._tell(found)

    def _tell(self, found: Mapping[str, Any]) -> None:
        """Who is told may fail (a job's folder that cannot be read): the watch goes on."""
        try:
            self.on_change(found)
        except Exception:
            name = found["metadata"]["name"]
            _log.exception("the change of %s %s was not taken in", self._kind, name)


def _ignore(_changed: Mapping[str, Any]) -> None:
    """Nobody wants to know."""
