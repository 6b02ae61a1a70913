"""Event and log streams: complete, resumable, ending with the job, closed at shutdown."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.api import streams
from service.api.logs import _whole_characters
from service.auth.keys import hash_secret, new_key
from service.catalogue import Catalogue
from service.client import Client
from service.client.streams import Message, read_messages
from service.jobs import JobState
from tests.service.running_service import KEY, RunningService, start_service

NewService = Callable[..., RunningService]
SSE = {"accept": "text/event-stream"}


def messages(service: RunningService, path: str, **headers: str) -> Iterator[Message]:
    with service.http.stream("GET", path, headers=SSE | headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield from read_messages(response.iter_bytes())


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, model_root: Path, catalogue: Catalogue
) -> Iterator[tuple[RunningService, str]]:
    """A job that has run to its end, with 5 events from its driver's spool and a log."""
    service = start_service(
        tmp_path_factory.mktemp("ended"),
        model_root=model_root,
        catalogue=catalogue,
        behaviours=("events=5", "print-environment", "succeed"),
        capacity=1,
    )
    job = service.submit()["id"]
    service.wait_for(job, JobState.SUCCEEDED)
    yield service, job
    service.stop()


def test_a_stream_tells_everything_once_and_ends_with_the_job(
    ended: tuple[RunningService, str],
) -> None:
    service, job = ended
    *events, end = messages(service, f"/v1/jobs/{job}/events")
    listed = service.http.get(f"/v1/jobs/{job}/events", params={"limit": 1000}).json()
    assert [m.data for m in events] == listed["data"]
    assert [m.id for m in events] == [str(n) for n in range(1, len(events) + 1)]
    assert [m.data["data"]["to"] for m in events if m.data["kind"] == "state"][-1] == "SUCCEEDED"
    assert (end.event, end.data["state"], end.id) == ("end", "SUCCEEDED", None)


def test_a_stream_goes_on_after_the_last_event_id(ended: tuple[RunningService, str]) -> None:
    service, job = ended
    path = f"/v1/jobs/{job}/events"
    everything = list(messages(service, path))
    assert list(messages(service, path, **{"last-event-id": "3"})) == everything[3:]
    assert list(messages(service, f"{path}?after=3")) == everything[3:]
    (only_end,) = messages(service, path, **{"last-event-id": "9999"})
    assert only_end.event == "end"


@pytest.mark.parametrize("last", ["x", "-1", "1" * 30])
def test_a_bad_last_event_id_is_refused(ended: tuple[RunningService, str], last: str) -> None:
    service, job = ended
    answer = service.http.get(f"/v1/jobs/{job}/events", headers=SSE | {"last-event-id": last})
    assert answer.status_code == 422


def test_events_come_page_by_page(ended: tuple[RunningService, str]) -> None:
    service, job = ended
    seen, after = [], 0
    while True:
        params = {"after": after, "limit": 3}
        page = service.http.get(f"/v1/jobs/{job}/events", params=params).json()
        seen += [event["id"] for event in page["data"]]
        if not page["has_more"]:
            break
        after = int(page["next"])
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > 6
    for bad in ({"limit": 0}, {"limit": 100_000}, {"after": -1}):
        assert service.http.get(f"/v1/jobs/{job}/events", params=bad).status_code == 422


def test_a_live_stream_shows_what_happens(new_service: NewService) -> None:
    service = new_service(behaviours=("wait", "succeed"), capacity=1)
    job = service.submit()["id"]
    seen: list[str] = []
    for message in messages(service, f"/v1/jobs/{job}/events"):
        if message.event == "end":
            seen.append("end")
        else:
            seen.append(message.data["data"]["to"])
            if seen[-1] == "RUNNING":
                (service.settings.jobs_dir / job / "go").touch()
    assert seen == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED", "end"]


def test_the_client_follows_a_job_across_a_restart_of_the_service(new_service: NewService) -> None:
    service = new_service(behaviours=("wait", "succeed"), capacity=1)
    job = service.submit()["id"]
    service.wait_for(job, JobState.RUNNING)
    ids: list[int] = []

    def follow() -> None:
        with Client(service.url, KEY, patience_seconds=60) as client:
            ids.extend(event.id for event in client.events(job))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    while len(ids) < 3:
        time.sleep(0.01)
    started = time.monotonic()
    service.stop()
    assert time.monotonic() - started < 5, "an open stream must not hold up a shutdown"
    again = new_service(behaviours=("wait", "succeed"), capacity=1, port=service.settings.port)
    (again.settings.jobs_dir / job / "go").touch()
    follower.join(timeout=60)
    assert not follower.is_alive()
    last = again.store.jobs.get(job)
    assert last.state is JobState.SUCCEEDED
    assert ids == list(range(1, last.event_count + 1))
    assert last.attempt_count == 1


def test_a_log_is_read_by_offset(ended: tuple[RunningService, str]) -> None:
    service, job = ended
    log = service.settings.jobs_dir / job / "attempts" / "1" / "log"
    log.write_text("é" * 2000 + "\nlast\u2028line")
    text, after = "", 0
    while True:
        params = {"after": after, "limit": 1025}  # cuts an é in two
        chunk = service.http.get(f"/v1/jobs/{job}/logs", params=params).json()
        assert (chunk["attempt"], chunk["offset"]) == (1, after)
        text, after = text + chunk["text"], chunk["next_offset"]
        if chunk["complete"]:
            break
    assert text == log.read_text()
    assert after == log.stat().st_size
    streamed = list(messages(service, f"/v1/jobs/{job}/logs"))
    assert "".join(m.data["text"] for m in streamed[:-1]) == text
    assert streamed[-1].event == "end"
    rest = list(messages(service, f"/v1/jobs/{job}/logs", **{"last-event-id": "1:4000"}))
    assert "".join(m.data["text"] for m in rest[:-1]) == "\nlast\u2028line"


@pytest.mark.parametrize("after", [10**15, 2**63 - 1])
def test_behind_the_end_of_a_log_there_is_nothing(
    ended: tuple[RunningService, str], after: int
) -> None:
    service, job = ended
    chunk = service.http.get(f"/v1/jobs/{job}/logs", params={"after": after}).json()
    assert (chunk["text"], chunk["next_offset"], chunk["complete"]) == ("", after, True)


def test_a_log_that_is_a_link_is_not_followed(
    ended: tuple[RunningService, str], tmp_path: Path
) -> None:
    service, _ = ended
    job = service.submit()["id"]
    service.wait_for(job, JobState.SUCCEEDED)
    log = service.settings.jobs_dir / job / "attempts" / "1" / "log"
    log.unlink()
    secret = tmp_path / "secret"
    secret.write_text("hf_secret123")
    log.symlink_to(secret)
    answer = service.http.get(f"/v1/jobs/{job}/logs")
    assert answer.status_code == 404
    assert "hf_secret123" not in answer.text


def test_logs_of_attempts_that_are_not_there(service: RunningService) -> None:
    job = service.submit()["id"]
    waiting = service.http.get(f"/v1/jobs/{job}/logs").json()
    assert (waiting["text"], waiting["complete"]) == ("", False)
    assert service.http.get(f"/v1/jobs/{job}/logs", params={"attempt": 1}).status_code == 404


@pytest.mark.parametrize("text", ["abc", "aé", "a€", "a😀"])
def test_a_character_is_never_cut(text: str) -> None:
    data = text.encode()
    for length in range(len(data) + 1):
        whole = _whole_characters(data[:length])
        assert whole.decode() in text
        assert length - len(whole) < 4
    assert _whole_characters(data) == data
    assert _whole_characters(b"\xff\xff") == b"\xff\xff"[: len(_whole_characters(b"\xff\xff"))]


def test_streams_need_a_key_too(ended: tuple[RunningService, str]) -> None:
    service, job = ended
    assert service.anonymous.get(f"/v1/jobs/{job}/events", headers=SSE).status_code == 401


@pytest.mark.parametrize("path", ["events", "logs?follow=true"])
def test_a_stream_ends_soon_after_its_key_was_revoked(
    new_service: NewService, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """And that of a key which was not goes on to the job's end."""
    monkeypatch.setattr(streams, "KEY_SECONDS", 0.2)
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 60.0)  # else no read times out
    service = new_service(behaviours=("wait", "succeed"), capacity=1)
    job = service.submit()["id"]
    service.wait_for(job, JobState.RUNNING)
    secret = new_key()
    key = service.store.keys.add("guest", hash_secret(secret))
    address = f"/v1/jobs/{job}/{path}"
    headers = SSE | {"authorization": f"Bearer {secret}"}
    with (
        service.http.stream("GET", address, headers=SSE) as other,
        service.anonymous.stream("GET", address, headers=headers, timeout=30) as response,
    ):
        pieces, others = response.iter_bytes(), other.iter_bytes()
        next(pieces), next(others)  # both are open
        service.store.keys.revoke(key.id)
        assert b"event: end" not in b"".join(pieces), "the job goes on"
        (service.settings.jobs_dir / job / "go").touch()
        assert b"event: end" in b"".join(others)
