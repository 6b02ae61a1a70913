"""Pushes an attempt's events to the service, in the background, for as long as it takes.

The service may be away, restart, or come back under another address; the job goes on, and its
events wait in the spool. The service answers each batch with the last number that it holds, and
that answer alone decides what is sent next: a service that was restored from a backup gets old
events again, and one that has read the spool itself is not sent them twice.
"""

import logging
import random
import threading
import time
from pathlib import Path

import httpx

from megatron_backend.driver.spool import EventSpool
from service.spec import EventBatch
from service.spec.attempt import attempt_path

log = logging.getLogger(__name__)

MAX_EVENTS = 500
MAX_BYTES = 1_000_000
GATHER_SECONDS = 0.1
"""Events that come close together travel in one batch."""
FIRST_BACKOFF_SECONDS = 0.25
LAST_BACKOFF_SECONDS = 10.0
REQUEST_SECONDS = 10.0


class Pusher:
    """A thread that sends what the spool holds.

    Attributes:
        stale: set once the service has said that a newer attempt has taken over.
    """

    def __init__(self, spool: EventSpool, *, job_dir: Path, job_id: str, attempt: int) -> None:
        self.stale = threading.Event()
        self._spool = spool
        self._endpoint_file = job_dir / "endpoint"
        self._token_file = attempt_path(job_dir, attempt) / "token"
        self._path = f"/v1/jobs/{job_id}/attempts/{attempt}/events"
        self._held = 0  # last number that the service says it holds
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._deadline = float("inf")
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, name="event-push", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Says that the spool has grown."""
        self._news.set()

    def stop(self, *, flush_seconds: float) -> bool:
        """Ends the thread, after a last try.

        Returns:
            False where there is a service, and it does not hold everything.
        """
        watched = self._endpoint_file.exists()
        if not watched:
            flush_seconds = 0.0
        self._deadline = time.monotonic() + flush_seconds
        self._stopping.set()
        self._news.set()
        self._thread.join(timeout=flush_seconds + 1.0)
        return not watched or self._held >= self._spool.last_seq

    def _run(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        with httpx.Client(trust_env=False) as client:
            while not self.stale.is_set() and self._remaining() > 0:
                if self._held < self._spool.last_seq:
                    complaint = self._push(client)
                    self._tell(complaint)
                    if complaint:
                        self._pause(backoff * random.uniform(0.7, 1.3))
                        backoff = min(backoff * 2, LAST_BACKOFF_SECONDS)
                    else:
                        backoff = FIRST_BACKOFF_SECONDS
                elif self._stopping.is_set():
                    return
                else:
                    self._news.wait()
                    self._news.clear()
                    self._stopping.wait(GATHER_SECONDS)

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _pause(self, seconds: float) -> None:
        """Waits before the next try; while stopping, only seconds are left, so not for long."""
        if self._stopping.wait(seconds):
            time.sleep(FIRST_BACKOFF_SECONDS)

    def _push(self, client: httpx.Client) -> str:
        """Sends one batch; what went wrong, or an empty string."""
        try:
            endpoint = self._endpoint_file.read_text(encoding="utf-8").strip().rstrip("/")
            token = self._token_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            return f"{error.filename} is not there"
        except OSError as error:
            return f"the job's folder cannot be read: {error}"
        try:
            self._spool.sync()  # the service must hold nothing that this machine could forget
            events = self._spool.read(self._held + 1, max_events=MAX_EVENTS, max_bytes=MAX_BYTES)
        except OSError as error:
            return f"the events on disk cannot be synced or read: {error}"
        try:
            response = client.post(
                endpoint + self._path,
                content=EventBatch(events=events).model_dump_json(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                timeout=max(min(REQUEST_SECONDS, self._remaining()), 0.1),
            )
            if response.status_code == httpx.codes.CONFLICT:
                self.stale.set()
                return f"the service says that this attempt is stale: {response.text[:500]}"
            if response.is_error:
                return f"the service answers {response.status_code}: {response.text[:500]}"
            self._held = int(response.json()["last_seq"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"the service cannot be reached at {endpoint}: {error}"
        except (ValueError, KeyError, TypeError) as error:
            return f"the service's answer has no last_seq: {error!r}"
        return ""

    def _tell(self, complaint: str) -> None:
        """Logs a complaint when it changes, not at every try."""
        if complaint and complaint != self._complaint:
            log.warning("events wait: %s", complaint)
        elif self._complaint and not complaint:
            log.info("events reach the service again")
        self._complaint = complaint
