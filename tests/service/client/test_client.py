"""The client against a real service, and against answers that a proxy might give."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from service.client import ApiError, Client, ConnectionLost
from service.spec import JobSpec
from tests.service.running_service import KEY, RunningService


def answering(*answers: httpx.Response | Exception) -> tuple[Client, list[httpx.Request]]:
    """A client whose network gives these answers, the last one again and again."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        found = answers[min(len(requests), len(answers)) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    transport = httpx.MockTransport(answer)
    return Client("http://test", KEY, patience_seconds=0.6, transport=transport), requests


def test_a_submit_that_is_tried_again_has_the_same_key(service: RunningService) -> None:
    job = service.submit()
    client, requests = answering(
        httpx.ConnectError("refused"),
        httpx.Response(502, text="bad"),
        httpx.Response(201, json=job),
    )
    assert client.submit({"name": "x"}).id == job["id"]
    keys = {request.headers["idempotency-key"] for request in requests}
    assert (len(requests), len(keys)) == (3, 1)
    assert client.submit({"name": "x"}).id == job["id"]
    assert requests[-1].headers["idempotency-key"] not in keys


def test_a_refusal_is_not_tried_again() -> None:
    client, requests = answering(httpx.Response(409, json={"title": "Conflict", "detail": "no"}))
    with pytest.raises(ApiError, match="409 Conflict: no"):
        client.job("x")
    assert len(requests) == 1


def test_a_page_of_a_proxy_becomes_a_readable_error() -> None:
    client, _ = answering(httpx.Response(404, text="<html>nginx</html>"))
    with pytest.raises(ApiError, match="no problem document: '<html>nginx"):
        client.job("x")


def test_another_server_is_not_taken_for_the_service() -> None:
    client, _ = answering(httpx.Response(200, text="<html>hello</html>"))
    with pytest.raises(ConnectionLost, match="is no Planish service: it sent '<html>hello"):
        client.job("x")
    client, _ = answering(httpx.Response(302, headers={"location": "/login"}))
    with pytest.raises(ApiError, match="302 Found"):
        client.job("x")


def test_patience_ends() -> None:
    client, requests = answering(httpx.ConnectError("refused"))
    with pytest.raises(ConnectionLost, match="refused"):
        client.job("x")
    assert len(requests) > 1
    with pytest.raises(ConnectionLost, match="refused"):
        list(client.events("x"))


def test_the_key_is_not_in_an_error() -> None:
    client, _ = answering(httpx.ConnectError("refused"))
    with pytest.raises(ConnectionLost) as caught:
        client.job("x")
    assert KEY not in str(caught.value)


def test_a_specs_defaults_are_left_to_the_service(service: RunningService) -> None:
    document = service.job_document()
    with Client(service.url, KEY) as client:
        job = client.submit(JobSpec.model_validate(document))
        assert job.spec == document
        plan = client.plan(document)
        assert plan.spec.name == "sample"


def test_all_pages_are_read(new_service: Callable[..., RunningService]) -> None:
    service = new_service()
    stored = [service.store_job(f"job-{n}") for n in range(105)]
    with Client(service.url, KEY) as client:
        assert [job.id for job in client.jobs()] == stored[::-1]
        assert len(list(client.jobs(limit=3))) == 3
        assert [job.id for job in client.jobs(name="job-7")] == [stored[7]]


def test_a_name_is_one_part_of_a_path() -> None:
    client, requests = answering(httpx.Response(404, json={}))
    for name in ("../files", "a/b", "a?b", "a#b", "%2e%2e"):
        with pytest.raises(ApiError):
            client.job(name)
        assert requests[-1].url.raw_path.startswith(b"/v1/jobs/")
        assert requests[-1].url.raw_path.count(b"/") == 3


def test_uploads_tell_how_far_they_are(service: RunningService, tmp_path: Any) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(200_000))
    seen: list[tuple[int, int]] = []
    with Client(service.url, KEY) as client:
        file = client.upload(path, purpose="user_data", on_progress=lambda *now: seen.append(now))
    assert (file.bytes, file.filename) == (200_000, "data.bin")
    assert seen[-1] == (200_000, 200_000)
    assert len(seen) > 2


def test_what_is_installed(service: RunningService) -> None:
    with Client(service.url, KEY) as client:
        listed = {a.type: a for a in client.algorithms()}
        assert listed.keys() >= {"sft", "grpo"}
        assert client.algorithm("grpo") == listed["grpo"]
        with pytest.raises(ApiError, match="GET /v1/algorithms lists them"):
            client.algorithm("a2c")
        assert "tools/calculator" in {e.id for e in client.environments()}
