"""One shape for every error: RFC 9457 problem details, the framework's own errors too."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from service.validation.problems import FieldProblem, InvalidRequest, from_pydantic

PROBLEM_JSON = "application/problem+json"
REQUEST_ID_HEADER = "x-request-id"
OPENAPI_RESPONSE = {
    "description": "Anything else is a problem (RFC 9457).",
    "content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}

_log = logging.getLogger(__name__)


class Problem(BaseModel):
    """The body of every answer with a status of 400 or more (RFC 9457)."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str = "about:blank"
    """A name for the kind of error that does not change, as `urn:planish:problem:stale-attempt`."""
    title: str
    """The kind of error in a few words."""
    status: int
    """The HTTP status."""
    detail: str
    """What was wrong this time, and what to do."""
    errors: Annotated[list[FieldProblem], Field(default_factory=list)]
    """Each field that is wrong."""
    request_id: str
    """The same as in the header `x-request-id`; it is in the service's log too."""


class Refusal(Exception):
    """Ends a request with a problem."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        kind: str | None = None,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.kind = kind
        self.errors = tuple(errors)
        self.headers = dict(headers or {})


def not_found(what: str, identifier: str, listed_at: str) -> Refusal:
    """A 404 for a resource, with the place that lists what there is."""
    return Refusal(
        HTTPStatus.NOT_FOUND,
        f"no {what} has the id {identifier!r}; GET {listed_at} lists them",
        kind="not-found",
    )


def problem_response(request: Request, refusal: Refusal) -> Response:
    """The answer for a refusal."""
    request_id = str(request.scope.get("state", {}).get("request_id", ""))
    problem = Problem(
        type=f"urn:planish:problem:{refusal.kind}" if refusal.kind else "about:blank",
        title=refusal.status.phrase,
        status=refusal.status.value,
        detail=refusal.detail,
        errors=list(refusal.errors),
        request_id=request_id,
    )
    return Response(
        problem.model_dump_json(),
        status_code=refusal.status.value,
        media_type=PROBLEM_JSON,
        headers={**refusal.headers, REQUEST_ID_HEADER: request_id},
    )


def invalid(problems: Sequence[FieldProblem], what: str = "request") -> Refusal:
    """A 422 for everything that is wrong with a request."""
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    where = f"{first.field}: " if first.field else ""
    return Refusal(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        f"the {what} was refused and nothing was stored: {where}{first.message}{more}",
        kind="invalid",
        errors=problems,
    )


def _allowed(routes: Sequence[APIRoute], request: Request) -> str:
    """All methods of a path; the framework names those of the first route that fits."""
    fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in fitting for method in route.methods or ()}))


def install(app: FastAPI, routes: Sequence[APIRoute]) -> None:
    """Makes every error of `app`, which has these routes, a problem."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return problem_response(request, error)

    @app.exception_handler(InvalidRequest)
    async def invalid_request(request: Request, error: InvalidRequest) -> Response:
        return problem_response(request, invalid(error.problems))

    @app.exception_handler(RequestValidationError)
    async def invalid_parameters(request: Request, error: RequestValidationError) -> Response:
        # The location begins with where it is: query, path or header.
        errors = [{**found, "loc": found["loc"][1:] or found["loc"]} for found in error.errors()]
        problems = from_pydantic(errors)
        return problem_response(request, invalid(problems))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status, headers = HTTPStatus(error.status_code), dict(error.headers or {})
        detail = str(error.detail)
        if status is HTTPStatus.NOT_FOUND and detail == status.phrase:
            detail = "nothing is here; GET /docs shows what this service has"
        elif status is HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = _allowed(routes, request) or headers.get("Allow", "others")
            headers = {"allow": allowed}
            detail = f"this path does not take {request.method}; it takes {allowed}"
        refusal = Refusal(status, detail, headers=headers)
        return problem_response(request, refusal)

    @app.exception_handler(Exception)
    async def fault(request: Request, _error: Exception) -> Response:
        # The server logs the traceback itself; the answer gives away nothing but the id to find it.
        request_id = request.scope.get("state", {}).get("request_id", "")
        _log.error("request %s failed: %s %r", request_id, request.method, request.url.path)
        return problem_response(
            request,
            Refusal(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the service failed; its log has the reason under this request id",
            ),
        )
