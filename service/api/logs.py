"""The logs of a job's attempts: by byte offset, or as a stream from attempt to attempt."""

import errno
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from service.api import streams
from service.api.context import Caller, Service, ServiceContext
from service.api.problems import Refusal
from service.api.resources import LogChunk
from service.jobs import ApiKey, AttemptState, Job
from service.store import NotFound

router = APIRouter(prefix="/v1", tags=["jobs"])

_MAX_OFFSET = 2**63 - 1
_STREAM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in which log."""

    attempt: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> "_Place":
        attempt, _, offset = text.partition(":")
        return cls(int(attempt), int(offset))

    def __str__(self) -> str:
        return f"{self.attempt}:{self.offset}"


@router.get(
    "/jobs/{job}/logs",
    response_model=LogChunk,
    responses={200: {"content": {streams.MEDIA_TYPE: {}}}},
)
async def read_log(
    job: str,
    request: Request,
    service: Service,
    caller: Caller,
    attempt: Annotated[
        int | None, Query(ge=1, le=2**31 - 1, description="Which attempt; the newest by default.")
    ] = None,
    after: Annotated[
        int, Query(ge=0, le=_MAX_OFFSET, description="Byte to begin at: `next_offset`.")
    ] = 0,
    limit: Annotated[
        int, Query(ge=1024, le=1024 * 1024, description="Bytes of a piece, at most.")
    ] = _STREAM_BYTES,
    follow: Annotated[
        bool, Query(description="Stream, as with `Accept: text/event-stream`.")
    ] = False,
    last_event_id: Annotated[
        str | None,
        Header(pattern=r"^[0-9]{1,9}:[0-9]{1,18}$", description="Of a stream: go on after this."),
    ] = None,
) -> LogChunk | StreamingResponse:
    """A piece of an attempt's log: what the driver and its ranks wrote."""
    found = await run_in_threadpool(service.find_job, job)
    if attempt is not None and attempt > found.attempt_count:
        raise Refusal(
            HTTPStatus.NOT_FOUND,
            f"job {found.id} has {found.attempt_count} attempts, not {attempt}",
            kind="not-found",
        )
    if follow or streams.wants_stream(request):
        start = _Place(attempt or 1, after)
        if last_event_id:
            start = _Place.parse(last_event_id)
        return StreamingResponse(
            _stream(service, caller, found.id, start, only=attempt),
            media_type=streams.MEDIA_TYPE,
            headers=dict(streams.HEADERS),
        )
    place = _Place(attempt or found.attempt_count, after)
    return await run_in_threadpool(_read, service, found, place, limit)


def _read(service: ServiceContext, job: Job, place: _Place, limit: int) -> LogChunk:
    # The state is read first: when it says ended, the log no longer grows.
    try:
        ended = service.store.attempts.get(job.id, place.attempt).state is AttemptState.ENDED
    except NotFound:
        ended = job.state.terminal
    data = _bytes_of(service.folder(job).attempt(place.attempt).log_path, place.offset, limit)
    at_end = len(data) < limit
    if not (ended and at_end):
        data = _whole_characters(data)
    return LogChunk(
        attempt=place.attempt,
        offset=place.offset,
        next_offset=place.offset + len(data),
        text=data.decode("utf-8", "replace"),
        complete=ended and at_end,
    )


def _bytes_of(path: Path, offset: int, limit: int) -> bytes:
    try:
        # A job's own code could put a link here; the service's secrets must not come out of it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise Refusal(HTTPStatus.NOT_FOUND, "the log is a link, which is not followed") from None
    with os.fdopen(descriptor, "rb") as file:
        # Far behind the end seek() itself may fail: each file system has its own largest offset.
        file.seek(min(offset, os.fstat(descriptor).st_size))
        return file.read(limit)


def _whole_characters(data: bytes) -> bytes:
    """Leaves out a UTF-8 character whose end has not been read yet."""
    for length in range(1, min(4, len(data) + 1)):
        byte = data[-length]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue  # in the middle of a character
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-length] if needed > length else data
    return data


async def _stream(
    service: ServiceContext, caller: ApiKey, job_id: str, place: _Place, *, only: int | None
) -> AsyncIterator[bytes]:
    yield streams.preamble()
    async with streams.news_of(service, caller, job_id) as news:
        while await news.wanted():
            job = await run_in_threadpool(service.store.jobs.get, job_id)
            chunk = await run_in_threadpool(_read, service, job, place, _STREAM_BYTES)
            if chunk.text:
                place = _Place(place.attempt, chunk.next_offset)
                yield streams.message(chunk.model_dump(mode="json"), id=str(place))
                news.sent()
            if chunk.complete and only is None and job.attempt_count > place.attempt:
                place = _Place(place.attempt + 1, 0)
                continue
            if chunk.complete and (only is not None or job.state.terminal):
                end = {"job_id": job_id, "state": job.state, "reason": job.reason}
                yield streams.message(end, event="end")
                return
            if chunk.text:
                continue
            if news.silent:
                yield streams.KEEP_ALIVE
                news.sent()
            await news.wait()
