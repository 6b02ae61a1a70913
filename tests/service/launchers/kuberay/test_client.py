import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from service.launchers import LauncherUnavailable
from service.launchers.kuberay.client import Api, Refused
from tests.service.launchers.kuberay.api_server import (
    Answer,
    ApiServer,
    Asked,
    refusal,
    serving,
    thing,
)


@contextmanager
def api(
    folder: Path, answer: Answer, *, held: threading.Event | None = None, limit: float = 30.0
) -> Iterator[tuple[Api, ApiServer]]:
    """An API server that gives one answer, `held` back until the event, and a client of it."""

    def reply(_asked: Asked) -> Answer:
        if held is not None:
            held.wait()
        return answer

    with serving(folder, reply) as server:
        made = Api("ns", kubeconfig=str(server.kubeconfig), timeout_seconds=limit)
        try:
            yield made, server
        finally:
            if held is not None:
                held.set()
            made.close()


def test_a_rayjob_is_made_in_strict_mode(tmp_path: Path) -> None:
    with api(tmp_path, Answer({"kind": "RayJob"}, status=201)) as (client, server):
        assert client.create_rayjob({"kind": "RayJob"}) == {"kind": "RayJob"}
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", "/apis/ray.io/v1/namespaces/ns/rayjobs")
    assert asked.query == {"fieldValidation": "Strict"}
    assert asked.body == {"kind": "RayJob"}


def test_a_rayjob_goes_only_after_its_pods(tmp_path: Path) -> None:
    with api(tmp_path, Answer({})) as (client, server):
        client.delete_rayjob("x")
        client.delete_pod("p", grace_seconds=1)
    assert server.asked[0].query == {"propagationPolicy": "Foreground"}
    assert server.asked[1].query == {"gracePeriodSeconds": "1"}


def test_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    with api(tmp_path, refusal(404, "not found")) as (client, _):
        assert client.get_rayjob("x") is None
        client.delete_rayjob("x")
        client.delete_pod("p", grace_seconds=1)


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
def test_a_refusal_has_the_servers_words(tmp_path: Path, status: int) -> None:
    with api(tmp_path, refusal(status, "exceeded quota")) as (client, _):
        with pytest.raises(Refused, match="exceeded quota") as refused:
            client.create_rayjob({})
        assert refused.value.status == status


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_a_server_that_is_not_well_says_nothing(tmp_path: Path, status: int) -> None:
    with api(tmp_path, refusal(status, "later")) as (client, _):
        with pytest.raises(LauncherUnavailable, match="later"):
            client.create_rayjob({})
        with pytest.raises(LauncherUnavailable, match="later"):
            client.get_rayjob("x")


def test_a_look_that_is_forbidden_says_nothing_either(tmp_path: Path) -> None:
    with (
        api(tmp_path, refusal(403, "rayjobs.ray.io is forbidden")) as (client, _),
        pytest.raises(LauncherUnavailable, match="is forbidden"),
    ):
        client.get_rayjob("x")


def test_every_call_has_a_time_limit(tmp_path: Path) -> None:
    """The server never answers; the client asks once, and says so after half a second."""
    with api(tmp_path, Answer({}), held=threading.Event(), limit=0.5) as (client, server):
        begun = time.monotonic()
        with pytest.raises(LauncherUnavailable, match="does not answer"):
            client.get_rayjob("x")
        assert time.monotonic() - begun < 1.9
        assert len(server.asked) == 1


def test_a_server_that_is_away_and_a_config_that_is_missing_say_so(tmp_path: Path) -> None:
    with serving(tmp_path, lambda _: Answer({})) as server:
        client = Api("ns", kubeconfig=str(server.kubeconfig), timeout_seconds=0.5)
    with pytest.raises(LauncherUnavailable, match="does not answer"):
        client.get_rayjob("x")
    client.close()
    server.kubeconfig.unlink()
    with pytest.raises(LauncherUnavailable, match="no way to reach Kubernetes"):
        Api("ns", kubeconfig=str(server.kubeconfig)).get_rayjob("x")


def test_a_client_that_is_closed_does_not_connect_again(tmp_path: Path) -> None:
    with api(tmp_path, Answer({})) as (client, server):
        client.get_rayjob("x")
        client.close()
        with pytest.raises(LauncherUnavailable, match="is closed"):
            client.get_rayjob("x")
        assert len(server.asked) == 1


class Stream:
    """Of a response, what ends it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended = False

    def shutdown(self) -> None:
        if self.error is not None:
            raise self.error
        self.ended = True


def kept(client: Api, stream: Stream) -> AbstractContextManager[None]:
    return client._kept(stream)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        TypeError("'NoneType' object is not callable"),
        AttributeError("'NoneType' object has no attribute 'shutdown'"),
    ],
    ids=["type", "attribute"],
)
def test_a_stream_that_goes_while_it_is_ended_does_not_keep_the_others_open(
    error: Exception,
) -> None:
    client, streams = Api("ns"), [Stream(error), Stream(), Stream()]
    with kept(client, streams[0]), kept(client, streams[1]), kept(client, streams[2]):
        client.close()
        assert [stream.ended for stream in streams] == [False, True, True]


def test_a_stream_that_was_answered_before_a_close_is_ended_after_it() -> None:
    client, stream = Api("ns"), Stream()
    client.close()
    with kept(client, stream):
        assert stream.ended


def test_a_stream_that_the_server_has_just_ended_does_not_keep_the_client_from_closing(
    tmp_path: Path,
) -> None:
    event = {"type": "ADDED", "object": thing("a", 1)}
    with api(tmp_path, Answer(events=[event, event])) as (client, _):
        stream = client.watch("rayjobs", "", "1", seconds=60)
        assert next(stream) == event  # it was read to its end, which gave its socket back
        client.close()
        assert list(stream) == [event]
