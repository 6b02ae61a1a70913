"""Workers push events with their attempt's own token; a stale attempt must end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.auth.keys import hash_secret
from service.jobs import JobState
from tests.service.running_service import KEY, RunningService


@pytest.fixture
def running(new_service: Callable[..., RunningService]) -> Iterator[tuple[RunningService, str]]:
    """A service, and a job whose first attempt's driver waits."""
    service = new_service(behaviours=("wait",), capacity=1)
    job = service.submit()["id"]
    service.wait_for(job, JobState.RUNNING)
    yield service, job
    (service.settings.jobs_dir / job / "go").touch()
    service.http.post(f"/v1/jobs/{job}/cancel")
    service.wait_for(job, *(state for state in JobState if state.terminal))


def token_path(service: RunningService, job: str) -> Path:
    return service.settings.jobs_dir / job / "attempts" / "1" / "token"


def push(
    service: RunningService, job: str, token: str, *seqs: int, attempt: int = 1, **changes: Any
) -> httpx.Response:
    events = [
        {"seq": seq, "time": float(seq), "kind": "progress", "data": {"step": seq}} | changes
        for seq in seqs
    ]
    return service.anonymous.post(
        f"/v1/jobs/{job}/attempts/{attempt}/events",
        json={"events": events},
        headers={"authorization": f"Bearer {token}"},
    )


def test_each_event_is_kept_once_whatever_is_sent_again(
    running: tuple[RunningService, str],
) -> None:
    service, job = running
    token = token_path(service, job).read_text()
    assert push(service, job, token, 1, 2).json() == {"last_seq": 2}
    assert push(service, job, token, 1, 2, 3).json() == {"last_seq": 3}
    assert push(service, job, token, 5, 6).json() == {"last_seq": 3}
    assert push(service, job, token, 4, 5).json() == {"last_seq": 5}
    listed = service.http.get(f"/v1/jobs/{job}/events").json()["data"]
    assert [e["id"] for e in listed] == list(range(1, len(listed) + 1))
    assert [e["data"]["step"] for e in listed if e["kind"] == "progress"] == [1, 2, 3, 4, 5]


def test_a_wrong_token_is_refused(running: tuple[RunningService, str]) -> None:
    service, job = running
    for token in ("wrong", KEY, hash_secret(token_path(service, job).read_text())):
        assert push(service, job, token, 1).status_code == 401
    no_token = service.anonymous.post(f"/v1/jobs/{job}/attempts/1/events", json={"events": []})
    assert no_token.status_code == 401


def test_a_workers_token_opens_nothing_else(running: tuple[RunningService, str]) -> None:
    service, job = running
    headers = {"authorization": f"Bearer {token_path(service, job).read_text()}"}
    assert service.anonymous.get(f"/v1/jobs/{job}", headers=headers).status_code == 401


def test_unknown_attempts_are_404(running: tuple[RunningService, str]) -> None:
    service, job = running
    token = token_path(service, job).read_text()
    assert push(service, job, token, 1, attempt=2).status_code == 404
    assert push(service, "job-zzzzzzzzzzzzzzzz", token, 1).status_code == 404


def test_an_attempt_that_has_ended_gets_409(running: tuple[RunningService, str]) -> None:
    service, job = running
    token = token_path(service, job).read_text()
    service.http.post(f"/v1/jobs/{job}/cancel")
    service.wait_for(job, JobState.CANCELLED)
    answer = push(service, job, token, 1)
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:planish:problem:stale-attempt"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seq": 0}, "events[0].seq"),
        ({"kind": "party"}, "events[0].kind"),
        ({"x": 1}, "events[0].x"),
        ({"seq": 2**63}, "events[0].seq"),
        ({"step": 2**63}, "events[0].step"),
    ],
)
def test_bad_batches_name_the_field(
    running: tuple[RunningService, str], changes: dict[str, Any], field: str
) -> None:
    service, job = running
    answer = push(service, job, token_path(service, job).read_text(), 1, **changes)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
