import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.launchers.kuberay import watch
from service.launchers.kuberay.client import Api
from service.launchers.kuberay.watch import Watch
from tests.service.launchers.kuberay.api_server import (
    Answer,
    ApiServer,
    Asked,
    listed,
    refusal,
    serving,
    thing,
)
from tests.waiting import wait_until

SECONDS = 20.0


def event(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": found}


class History:
    """Answers lists and streams one after the other, and then with silence."""

    def __init__(self, lists: list[Answer], streams: list[Answer]) -> None:
        self.lists, self.streams = lists, streams
        self.versions: list[str] = []

    def __call__(self, asked: Asked) -> Answer:
        if "watch" not in asked.query:
            return self.lists.pop(0)
        self.versions.append(asked.query["resourceVersion"])
        assert asked.query["allowWatchBookmarks"].lower() == "true"
        if self.streams:
            return self.streams.pop(0)
        time.sleep(0.05)  # an empty stream that the server ends
        return Answer(events=[])


@contextmanager
def watching(folder: Path, history: History) -> Iterator[tuple[Watch, ApiServer]]:
    with serving(folder, history) as server:
        api = Api("ns", kubeconfig=str(server.kubeconfig), timeout_seconds=5)
        made = Watch(api, "rayjobs", "a=b")
        made.start()
        try:
            yield made, server
        finally:
            made.stop()
            api.close()
            made.join(SECONDS)


def test_g29_a_history_that_is_gone_is_listed_again_and_nothing_is_missed(tmp_path: Path) -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    history = History(
        [listed(10, thing("a", 9), thing("old", 8)), listed(20, thing("a", 11), thing("c", 19))],
        [
            Answer(
                events=[
                    event("MODIFIED", thing("a", 11)),
                    event("ADDED", thing("b", 12)),
                    event("BOOKMARK", thing("", 13)),
                    gone,
                ]
            ),
            Answer(events=[event("DELETED", thing("a", 21))]),
        ],
    )
    seen: list[str] = []
    with watching(tmp_path, history) as (watched, _):
        watched.on_change = lambda found: seen.append(found["metadata"]["name"])
        wait_until(
            lambda: watched.health.lists == 2 and watched.get("c") and not watched.get("a"),
            "the second list and what came after it are seen",
            SECONDS,
        )
        assert watched.get("b") is None  # it went while nobody looked
        assert watched.get("old") is None
        assert watched.fresh
        assert watched.health.failures == 0
        wait_until(lambda: len(history.versions) > 3, "a fourth stream is opened", SECONDS)
    assert history.versions[:3] == ["10", "20", "21"]
    assert {"c", "a"} <= set(seen)


def test_an_http_410_is_the_same(tmp_path: Path) -> None:
    history = History([listed(1), listed(5, thing("a", 4))], [refusal(410, "Gone")])
    with watching(tmp_path, history) as (watched, _):
        wait_until(lambda: watched.get("a"), "`a` is seen", SECONDS)
        assert watched.health.lists == 2


def test_a_stream_goes_on_from_the_last_bookmark(tmp_path: Path) -> None:
    history = History([listed(1)], [Answer(events=[event("BOOKMARK", thing("", 7))])])
    with watching(tmp_path, history) as (watched, _):
        wait_until(lambda: len(history.versions) > 2, "a third stream is opened", SECONDS)
        assert watched.health.lists == 1
    assert history.versions[:3] == ["1", "7", "7"]


def test_a_stream_that_breaks_is_taken_up_where_it_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_PAUSES", (0.01,))
    history = History(
        [listed(1)],
        [
            Answer(events=[event("ADDED", thing("a", 2))], cut=True),
            refusal(503, "the server is starting"),
            Answer(events=[event("ADDED", thing("b", 3))]),
        ],
    )
    with watching(tmp_path, history) as (watched, _):
        wait_until(lambda: watched.get("b"), "`b` is seen", SECONDS)
        assert watched.get("a") is not None
        assert watched.health.failures >= 1
        assert watched.health.lists == 1


def test_what_was_heard_long_ago_is_not_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(tmp_path, History([listed(1)], [])) as (watched, _):
        wait_until(lambda: watched.fresh, "the watch is fresh", SECONDS)
    monkeypatch.setattr(watch, "FRESH_SECONDS", 0.0)
    assert not watched.fresh


def test_objects_are_found_by_their_labels(tmp_path: Path) -> None:
    one, other = thing("one", 1), thing("other", 1)
    one["metadata"]["labels"] = {"job": "x", "attempt": "1"}
    with watching(tmp_path, History([listed(1, one, other)], [])) as (watched, _):
        wait_until(lambda: watched.fresh, "the watch is fresh", SECONDS)
        assert watched.labelled({"job": "x"}) == [one]
        assert watched.labelled({"job": "y"}) == []


def test_who_is_told_of_a_change_and_fails_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    def fail(found: Mapping[str, Any]) -> None:
        told.set()
        raise OSError(f"stale file handle of {found['metadata']['name']}")

    history = History([listed(1, thing("a", 1))], [Answer(events=[event("ADDED", thing("b", 2))])])
    with serving(tmp_path, history) as server:
        api = Api("ns", kubeconfig=str(server.kubeconfig), timeout_seconds=5)
        watched = Watch(api, "rayjobs", "a=b")
        watched.on_change = fail
        watched.start()
        try:
            assert told.wait(SECONDS)
            wait_until(
                lambda: watched.get("b") and len(history.versions) > 2,
                "`b` is seen and a third stream is opened",
                SECONDS,
            )
        finally:
            watched.stop()
            api.close()
            watched.join(SECONDS)
    assert watched.health.lists == 1
    assert "stale file handle of b" in caplog.text


def test_an_answer_that_is_not_understood_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "_PAUSES", (0.01,))
    history = History(
        [Answer({"metadata": {}}), listed(1), listed(5, thing("a", 4))],
        [Answer(events=[{"type": "ADDED", "object": {}}])],
    )
    with watching(tmp_path, history) as (watched, _):
        wait_until(lambda: watched.get("a"), "`a` is seen", SECONDS)
        assert watched.health.lists == 2
        assert watched.health.failures == 2
    assert "KeyError: 'items'" in caplog.text


def test_a_stream_that_is_answered_after_a_close_does_not_keep_the_watch(tmp_path: Path) -> None:
    released = threading.Event()

    def held() -> Iterator[dict[str, Any]]:
        released.wait(SECONDS)
        yield event("ADDED", thing("a", 2))

    def reply(asked: Asked) -> Answer:
        if "watch" not in asked.query:
            return listed(1)
        watched.stop()
        api.close()
        return Answer(events=held())

    with serving(tmp_path, reply) as server:
        api = Api("ns", kubeconfig=str(server.kubeconfig), timeout_seconds=5)
        watched = Watch(api, "rayjobs", "a=b")
        watched.start()
        try:
            thread = watched._thread
            assert thread is not None
            watched.join(5)
            assert not thread.is_alive()
        finally:
            released.set()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Read on closed or unwrapped SSL socket."),
        UnicodeDecodeError("utf-8", b"\x80", 0, 1, "invalid start byte"),
    ],
    ids=["closed", "encrypted"],
)
def test_what_a_reader_sees_of_a_close_is_no_failure(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    reading, closed = threading.Event(), threading.Event()

    class Closing(Api):
        def rayjobs(self, _selector: str) -> dict[str, Any]:
            found: dict[str, Any] = listed(1).body
            return found

        def watch(self, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
            reading.set()
            assert closed.wait(SECONDS)
            raise error
            yield

    watched = Watch(Closing("ns"), "rayjobs", "a=b")
    watched.start()
    assert reading.wait(SECONDS)
    watched.stop()
    closed.set()
    watched.join(SECONDS)
    assert watched.health.failures == 0
    assert not caplog.records
