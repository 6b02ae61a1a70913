"""A job's events, as a list or as a stream that ends with the job."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from service.api import streams
from service.api.context import Caller, Service, ServiceContext
from service.api.resources import EventResource, Listing
from service.api.views import event_resource
from service.jobs import ApiKey, Event

router = APIRouter(prefix="/v1", tags=["jobs"])

_BATCH = 500
_MAX_NUMBER = 2**63 - 1

Number = Annotated[int, Query(ge=0, le=_MAX_NUMBER, description="Only events after this id.")]


@router.get(
    "/jobs/{job}/events",
    response_model=Listing[EventResource],
    responses={200: {"content": {streams.MEDIA_TYPE: {}}}},
)
async def list_events(
    job: str,
    request: Request,
    service: Service,
    caller: Caller,
    after: Number = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Events of a page.")] = 100,
    last_event_id: Annotated[
        str | None,
        Header(pattern=r"^[0-9]{1,18}$", description="Of a stream: go on after this id."),
    ] = None,
) -> Listing[EventResource] | StreamingResponse:
    """A job's events, oldest first; with `Accept: text/event-stream` as a stream.

    The stream goes on while the job does and its key is accepted. Its last message has the event
    `end` and the job's state, so that a client knows an end from a lost connection.
    """
    found = await run_in_threadpool(service.find_job, job)
    if streams.wants_stream(request):
        start = int(last_event_id) if last_event_id else after
        return StreamingResponse(
            _stream(service, caller, found.id, start),
            media_type=streams.MEDIA_TYPE,
            headers=dict(streams.HEADERS),
        )
    events = await run_in_threadpool(service.store.events.after, found.id, after, limit=limit + 1)
    rows = [event_resource(event) for event in events[:limit]]
    more = len(events) > limit
    return Listing(data=rows, has_more=more, next=str(rows[-1].id) if more else None)


def _message(event: Event) -> bytes:
    return streams.message(event_resource(event).model_dump(mode="json"), id=str(event.number))


async def _stream(
    service: ServiceContext, caller: ApiKey, job_id: str, after: int
) -> AsyncIterator[bytes]:
    yield streams.preamble()
    async with streams.news_of(service, caller, job_id) as news:
        while await news.wanted():
            # The state is read before the events: the last event is written with the last state,
            # so what an ended job has to say is all there.
            job = await run_in_threadpool(service.store.jobs.get, job_id)
            events = await run_in_threadpool(
                service.store.events.after, job_id, after, limit=_BATCH
            )
            if events:
                after = events[-1].number
                # In one piece: a client that has gone is noticed between pieces, not within one.
                yield b"".join(map(_message, events))
                news.sent()
            if len(events) == _BATCH:
                continue
            if job.state.terminal:
                end = {"job_id": job_id, "state": job.state, "reason": job.reason}
                yield streams.message(end, event="end")
                return
            if news.silent:
                yield streams.KEEP_ALIVE
                news.sent()
            await news.wait()
