"""One shape for every error, whoever raises it."""

import base64

import httpx
import pytest
from fastapi import FastAPI

from service.app import create_app
from service.settings import Settings
from tests.service.running_service import RunningService


def assert_problem(answer: httpx.Response, status: int) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = dict(answer.json())
    assert problem.keys() == {"type", "title", "status", "detail", "errors", "request_id"}
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["request_id"] == answer.headers["x-request-id"]
    return problem


def _cursor(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/no/such/path", 404),
        ("GET", "/v1/jobs/job-0000000000000000", 404),
        ("GET", "/v1/files/../../etc/passwd", 404),
        ("GET", "/v1/files/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/jobs?limit=0", 422),
        ("GET", "/v1/jobs?after=nonsense", 422),
        ("GET", f"/v1/jobs?after={_cursor('[1' + '0' * 300 + ', "job-x"]')}", 422),
        ("GET", f"/v1/jobs?after={_cursor(r'[1.0, "\ud800"]')}", 422),
        ("GET", f"/v1/jobs?after={_cursor(r'[1.0, "a\u0000"]')}", 422),
        ("GET", f"/v1/jobs?after={_cursor('[NaN, "job-x"]')}", 422),
        ("GET", "/v1/jobs/", 404),
        ("POST", "/v1/jobs", 422),
        ("POST", "/v1/files", 422),
        ("POST", "/v1/jobs/x/attempts/0/events", 422),
    ],
)
def test_every_error_is_a_problem(
    service: RunningService, method: str, path: str, status: int
) -> None:
    assert_problem(service.http.request(method, path), status)


def test_a_wrong_method_names_the_right_ones(service: RunningService) -> None:
    answer = service.http.delete("/v1/files")
    assert answer.headers.get_list("allow") == ["GET, POST"]
    assert "it takes GET, POST" in str(assert_problem(answer, 405)["detail"])


def test_a_parameter_is_named_without_its_place(service: RunningService) -> None:
    problem = assert_problem(service.http.get("/v1/jobs", params={"limit": "many"}), 422)
    assert problem["errors"][0]["field"] == "limit"  # type: ignore[index]


def test_a_body_that_is_too_large_is_refused_by_its_header_and_while_read(
    service: RunningService,
) -> None:
    body = b" " * (service.settings.max_body_bytes + 1)
    problem = assert_problem(service.http.post("/v1/jobs", content=body), 413)
    assert str(service.settings.max_body_bytes) in str(problem["detail"])
    in_pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    assert_problem(service.http.post("/v1/jobs", content=in_pieces), 413)


@pytest.mark.asyncio
async def test_a_fault_gives_away_nothing_but_the_id() -> None:
    app: FastAPI = create_app(Settings(data_dir="/nonexistent"))

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("hf_secret123")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/broken")
    assert_problem(answer, 500)
    assert "hf_secret123" not in answer.text


def test_each_request_has_its_own_id(service: RunningService) -> None:
    ids = {service.http.get("/healthz").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
