"""Where workers push their events."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from service.api.context import AttemptToken, Service, unauthorized
from service.api.problems import Refusal
from service.api.resources import Ingested
from service.spec import EventBatch
from service.store import NotFound, StaleAttempt, WrongToken
from service.validation.problems import InvalidRequest, from_pydantic

router = APIRouter(prefix="/v1", tags=["workers"])

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EventBatch"}}},
    }
}


@router.post("/jobs/{job}/attempts/{attempt}/events", openapi_extra=_BODY)
async def push_events(
    job: str,
    attempt: Annotated[int, Path(ge=1, le=2**31 - 1)],
    request: Request,
    service: Service,
    token: AttemptToken,
) -> Ingested:
    """Takes in a batch of an attempt's events. What is known already is skipped."""
    try:
        batch = EventBatch.model_validate_json(await request.body())
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise InvalidRequest(from_pydantic(errors)) from None
    try:
        answer = await run_in_threadpool(
            service.store.events.ingest, job, attempt, token, batch.events
        )
    except NotFound as error:
        raise Refusal(HTTPStatus.NOT_FOUND, str(error), kind="not-found") from None
    except WrongToken as error:
        raise unauthorized(str(error)) from None
    except StaleAttempt as error:
        raise Refusal(
            HTTPStatus.CONFLICT,
            f"{error}; it must end",
            kind="stale-attempt",
            headers={"x-should-retry": "false"},
        ) from None
    return Ingested(last_seq=answer.last_seq)
