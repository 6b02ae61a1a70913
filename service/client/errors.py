"""What the client raises."""

from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from service.validation.problems import FieldProblem


class ClientError(Exception):
    """Any failure of a call."""


class ConnectionLost(ClientError):
    """The service did not answer."""


class _Problem(BaseModel):
    type: str = "about:blank"
    title: str = ""
    detail: str = ""
    errors: list[FieldProblem] = []
    request_id: str = ""


class ApiError(ClientError):
    """The service refused the request, with a problem."""

    def __init__(self, status: int, problem: _Problem) -> None:
        super().__init__(f"{status} {problem.title}: {problem.detail}")
        self.status = status
        self.kind = problem.type.removeprefix("urn:planish:problem:")
        """What kind of problem it is, as `invalid`, `stale-attempt` or `about:blank`."""
        self.title = problem.title
        self.detail = problem.detail
        self.errors = problem.errors
        self.request_id = problem.request_id

    @property
    def temporary(self) -> bool:
        """Whether the same request may do later."""
        return self.status >= 500 or self.status == 429


def api_error(response: httpx.Response) -> ApiError:
    """The error in an answer whose body was read."""
    try:
        found: Any = response.json()
        problem = _Problem.model_validate(found)
    except (ValueError, ValidationError):  # from a proxy in between
        problem = _Problem(
            title=response.reason_phrase,
            detail=f"the answer is no problem document: {response.text[:200]!r}",
            request_id=response.headers.get("x-request-id", ""),
        )
    return ApiError(response.status_code, problem)
