"""Server-sent events: how a stream waits for news, and how one message is written."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from service.api.context import ServiceContext
from service.jobs import ApiKey

MEDIA_TYPE = "text/event-stream"
HEADERS: Mapping[str, str] = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would hold the stream back
}
KEEP_ALIVE_SECONDS = 15.0
KEY_SECONDS = 14.0
"""How long a stream may outlive the key that it was opened with, before a look at the next news."""
KEEP_ALIVE = b": keep-alive\n\n"
# How long a client should wait before it connects again.
RETRY_MILLISECONDS = 1000


def message(data: Any, *, id: str | None = None, event: str | None = None) -> bytes:
    """One message. JSON has no raw line breaks, so its data is always one line."""
    lines = []
    if event is not None:
        lines.append(f"event: {event}")
    if id is not None:
        lines.append(f"id: {id}")
    lines.append(f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}")
    return ("\n".join(lines) + "\n\n").encode()


def preamble() -> bytes:
    """The first bytes of a stream: they also make proxies send the headers."""
    return f"retry: {RETRY_MILLISECONDS}\n\n".encode()


def wants_stream(request: Request) -> bool:
    """Whether the client asks for a stream with its `Accept` header."""
    return MEDIA_TYPE in request.headers.get("accept", "").lower()


class News:
    """Waits until something may have changed about a job, or a little while.

    The store rings a bell in this process; another process may write too, so a look at the store
    every few polls is part of the deal.
    """

    def __init__(self, service: ServiceContext, caller: ApiKey) -> None:
        self._service, self._caller = service, caller
        self.bell = asyncio.Event()
        self._last_sent = self._key_seen = time.monotonic()

    async def wanted(self) -> bool:
        """Whether the stream goes on: neither has the service to end, nor was the key revoked."""
        if self._service.stopping.is_set():
            return False
        if time.monotonic() - self._key_seen < KEY_SECONDS:
            return True
        self._key_seen = time.monotonic()
        by_hash = self._service.store.keys.by_hash
        return await run_in_threadpool(by_hash, self._caller.secret_hash) is not None

    def sent(self) -> None:
        """Notes that something was sent just now."""
        self._last_sent = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether the stream has been silent so long that a proxy might close it."""
        return time.monotonic() - self._last_sent > KEEP_ALIVE_SECONDS

    async def wait(self) -> None:
        """Returns at the bell, at the service's end, or after the polling interval."""
        waits = [
            asyncio.create_task(self.bell.wait()),
            asyncio.create_task(self._service.stopping.wait()),
        ]
        try:
            await asyncio.wait(
                waits,
                timeout=self._service.settings.stream_poll_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for task in waits:
                task.cancel()
        self.bell.clear()


@asynccontextmanager
async def news_of(service: ServiceContext, caller: ApiKey, job_id: str) -> AsyncIterator[News]:
    """Listens for changes of a job, for whoever opened the stream."""
    news = News(service, caller)
    loop = asyncio.get_running_loop()

    def ring(changed: str) -> None:
        if changed == job_id:
            loop.call_soon_threadsafe(news.bell.set)

    unsubscribe = service.store.changes.subscribe(ring)
    try:
        yield news
    finally:
        unsubscribe()
