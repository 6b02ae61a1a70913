"""Events are numbered without a gap, survive kill -9, and reach a service that comes and goes."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from megatron_backend.checkpoint.fence import StaleAttempt
from megatron_backend.driver import recorder as recorder_module
from megatron_backend.driver import spool as spool_module
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.driver.spool import EventSpool
from service.spec import EventBatch, WorkerEvent
from tests.megatron_backend.driver.saves import no_room_for_events
from tests.waiting import wait_until

TOKEN = "only-for-attempt-1"
SECONDS = 10.0


class Service:
    """What the service does with events, over real HTTP: keeps new ones, answers with the last."""

    def __init__(self, job_dir: Path) -> None:
        self.events: list[WorkerEvent] = []
        self.posts = 0
        self.status = 200
        self._job_dir = job_dir

    @contextmanager
    def listening(self) -> Iterator[None]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = service.take(self.path, self.headers["Authorization"], body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
            )
            thread.start()
            endpoint = f"http://127.0.0.1:{server.server_port}/"
            (self._job_dir / "endpoint").write_text(endpoint)  # another port after each restart
            yield
            server.shutdown()
            thread.join()

    def take(self, path: str, authorization: str, body: bytes) -> tuple[int, dict[str, int | str]]:
        self.posts += 1
        if path != "/v1/jobs/job-1/attempts/1/events" or authorization != f"Bearer {TOKEN}":
            return 401, {"detail": "who are you"}
        if self.status != 200:
            return self.status, {"detail": "no"}
        for event in EventBatch.model_validate_json(body).events:
            if event.seq == len(self.events) + 1:
                self.events.append(event)
        return 200, {"last_seq": len(self.events)}

    def numbers(self) -> list[int]:
        return [event.seq for event in self.events]


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "token").write_text(TOKEN + "\n")
    return tmp_path


def make(job_dir: Path) -> SpoolRecorder:
    return SpoolRecorder(job_dir, job_id="job-1", attempt=1)


def wait_for_events(service: Service, *numbers: int) -> None:
    """Until it has just these."""
    wait_until(
        lambda: service.numbers() == [*numbers],
        f"the service has events {numbers}",
        SECONDS,
        details=lambda: f"it has {service.numbers()}",
    )


def spooled(job_dir: Path) -> list[WorkerEvent]:
    lines = (job_dir / "attempts" / "1" / "events.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b""
    return [WorkerEvent.model_validate_json(line) for line in lines[:-1]]


def test_events_arrive_in_order(job_dir: Path) -> None:
    service = Service(job_dir)
    with service.listening():
        recorder = make(job_dir)
        for step in range(1, 1301):
            recorder.record("metrics", {"loss": 1 / step}, step=step)
        recorder.close()
    assert service.events == spooled(job_dir)
    assert service.numbers() == list(range(1, 1301))
    assert service.posts < 100  # in batches


def test_steps_that_are_taken_again_are_told_once(job_dir: Path) -> None:
    """Ranks that are started anew inside an attempt take the steps since the last checkpoint."""
    recorder = make(job_dir)

    def step(number: int, *, warning: str = "") -> None:
        recorder.record("progress", {"step": number, "phase": "done"})
        recorder.record("metrics", {"loss": 1 / number}, step=number)
        for item in range(2):
            recorder.record("sample", {"item": item}, step=number)
        if warning:
            recorder.record("warning", {"message": warning}, step=number)

    recorder.replay()  # at the start of a run there is nothing yet
    step(1)
    recorder.record("checkpoint", {"path": "x"}, step=1)
    step(2, warning="one")
    recorder.record("metrics", {"loss": 1 / 3}, step=3)
    recorder.record("sample", {"item": 0}, step=3)  # here a rank dies
    recorder.record("warning", {"message": "rank 1 died"})
    recorder.replay()
    step(2, warning="one")
    step(3, warning="two")
    recorder.record("checkpoint", {"path": "x"}, step=3)
    recorder.replay()
    step(4)
    recorder.close()
    told = [event for event in spooled(job_dir) if event.kind != "progress"]
    assert [(event.kind, event.step, event.data.get("item")) for event in told] == [
        *(("metrics", 1, None), ("sample", 1, 0), ("sample", 1, 1), ("checkpoint", 1, None)),
        *(("metrics", 2, None), ("sample", 2, 0), ("sample", 2, 1), ("warning", 2, None)),
        *(("metrics", 3, None), ("sample", 3, 0), ("warning", None, None)),
        *(("sample", 3, 1), ("warning", 3, None), ("checkpoint", 3, None)),
        *(("metrics", 4, None), ("sample", 4, 0), ("sample", 4, 1)),
    ]
    assert [event.seq for event in spooled(job_dir)] == list(range(1, len(spooled(job_dir)) + 1))


def test_service_goes_away_and_comes_back_under_another_port(job_dir: Path) -> None:
    service = Service(job_dir)
    recorder = make(job_dir)
    recorder.record("started", {"world_size": 1})  # before there is any service
    with service.listening():
        wait_for_events(service, 1)
        recorder.record("metrics", {"loss": 2.0}, step=1)
        wait_for_events(service, 1, 2)
    recorder.record("metrics", {"loss": 1.5}, step=2)  # nobody listens: the job goes on
    recorder.record("metrics", {"loss": 1.0}, step=3)
    with service.listening():
        wait_for_events(service, 1, 2, 3, 4)
        service.status = 503
        recorder.record("metrics", {"loss": 0.5}, step=4)
        before = service.posts
        wait_until(lambda: service.posts > before, "the service is asked again", SECONDS)
        service.status = 200
        wait_for_events(service, 1, 2, 3, 4, 5)
        recorder.close()
    assert service.events == spooled(job_dir)


def test_an_attempt_that_the_service_does_not_know_yet_waits_for_its_token(job_dir: Path) -> None:
    """A cluster may start the next attempt by itself; the service opens it later."""
    token = job_dir / "attempts" / "1" / "token"
    token.unlink()
    service = Service(job_dir)
    with service.listening():
        recorder = make(job_dir)
        recorder.record("started", {"world_size": 1})
        recorder.record("metrics", {"loss": 2.0}, step=1)
        time.sleep(0.5)
        assert service.posts == 0
        token.write_text(TOKEN + "\n")
        wait_for_events(service, 1, 2)
        recorder.close()
    assert service.events == spooled(job_dir)


@pytest.mark.parametrize("method", ["sync", "read"])
def test_a_disk_that_fails_once_does_not_end_the_pushing(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    whole = getattr(EventSpool, method)
    calls = []

    def failing(spool: EventSpool, *args: int, **options: int) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return whole(spool, *args, **options)

    monkeypatch.setattr(EventSpool, method, failing)
    service = Service(job_dir)
    with service.listening():
        recorder = make(job_dir)
        recorder.record("started", {"world_size": 1})
        wait_until(lambda: calls, "the disk fails", SECONDS)
        recorder.record("metrics", {"loss": 2.0}, step=1)
        wait_for_events(service, 1, 2)
        recorder.close()
    assert service.events == spooled(job_dir)


def test_a_token_that_cannot_be_read_for_a_while_does_not_end_the_pushing(
    job_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = job_dir / "attempts" / "1" / "token"
    token.unlink()
    token.mkdir()  # reading it is an OSError, for root too
    service = Service(job_dir)
    with service.listening():
        recorder = make(job_dir)
        recorder.record("started", {"world_size": 1})
        wait_until(lambda: "the job's folder cannot be read" in caplog.text, "it says so", SECONDS)
        token.rmdir()
        token.write_text(TOKEN + "\n")
        wait_for_events(service, 1)
        recorder.close()
    assert service.events == spooled(job_dir)


def test_service_that_forgot_gets_old_events_again(job_dir: Path) -> None:
    service = Service(job_dir)
    with service.listening():
        recorder = make(job_dir)
        for step in range(1, 4):
            recorder.record("metrics", {}, step=step)
        wait_for_events(service, 1, 2, 3)
        del service.events[1:]  # restored from a backup
        recorder.record("metrics", {}, step=4)
        recorder.close()
    assert service.numbers() == [1, 2, 3, 4]


def test_stale_attempt_stops(job_dir: Path) -> None:
    service = Service(job_dir)
    service.status = 409
    with service.listening():
        recorder = make(job_dir)
        recorder.record("metrics", {}, step=1)
        wait_until(lambda: service.posts == 1, "the service is told", SECONDS)

        def refused() -> bool:
            try:
                recorder.record("metrics", {}, step=2)
            except StaleAttempt:
                return True
            return False

        wait_until(refused, "the recorder refuses", SECONDS)
        recorder.close()
    assert service.posts == 1


def test_close_does_not_wait_for_ever(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_SECONDS", 0.5)
    (job_dir / "endpoint").write_text("http://127.0.0.1:9/")
    recorder = make(job_dir)
    recorder.record("metrics", {}, step=1)
    begin = time.monotonic()
    recorder.close()
    assert time.monotonic() - begin < 3
    assert [event.seq for event in spooled(job_dir)] == [1]


def test_close_catches_a_service_that_is_just_coming_back(job_dir: Path) -> None:
    service = Service(job_dir)
    (job_dir / "endpoint").write_text("http://127.0.0.1:9/")
    recorder = make(job_dir)
    recorder.record("metrics", {}, step=1)
    closing = threading.Thread(target=recorder.close, daemon=True)
    closing.start()
    time.sleep(0.5)
    with service.listening():
        closing.join()
    assert service.numbers() == [1]


def test_close_leaves_nothing_open_where_the_disk_fails(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    recorder = make(job_dir)
    recorder.record("metrics", {}, step=1)
    path = str(job_dir / "attempts" / "1" / "events.jsonl")
    assert path in {file.path for file in psutil.Process().open_files()}
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Stale file handle"):
        recorder.close()
    assert path not in {file.path for file in psutil.Process().open_files()}
    wait_until(
        lambda: "event-push" not in {thread.name for thread in threading.enumerate()},
        "the pushing ends",
        SECONDS,
    )


def test_kill_9_leaves_a_spool_without_gap_and_numbering_goes_on(job_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from megatron_backend.driver.recorder import SpoolRecorder\n"
        "recorder = SpoolRecorder(Path(sys.argv[1]), job_id='job-1', attempt=1)\n"
        "for step in range(1, 10**9):\n"
        "    recorder.record('metrics', {'loss': 1.0, 'text': 'x' * 5000}, step=step)\n"
        "    if step == 100: print('going', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(job_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "going\n"
        driver.send_signal(signal.SIGKILL)
    recorder = make(job_dir)
    recorder.record("warning", {"message": "back"})
    events = spooled(job_dir)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len(events) > 100
    assert events[-1].data == {"message": "back"}
    recorder.close()


def test_a_full_disk_keeps_no_half_lines_and_loses_no_events(job_dir: Path) -> None:
    path = job_dir / "attempts" / "1" / "events.jsonl"
    recorder = make(job_dir)
    recorder.record("metrics", {"loss": 1.0}, step=1)
    for again in range(2):
        before = path.read_bytes()
        with no_room_for_events():
            for item in range(2):
                recorder.record("sample", {"item": item}, step=again)
            with pytest.raises(OSError, match="No space left"):
                recorder.sync()
            assert path.read_bytes() == before
        recorder.record("warning", {"message": "there is room"})
        assert [event.seq for event in spooled(job_dir)] == list(range(1, 5 + 3 * again))
    recorder.close()


def test_events_that_waited_for_room_reach_the_service(
    job_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(job_dir)
    with service.listening():
        recorder = make(job_dir)
        with no_room_for_events():
            recorder.record("metrics", {"loss": 1.0}, step=1)
            wait_until(lambda: "events wait: " in caplog.text, "the pusher says so", SECONDS)
            assert service.numbers() == []
        wait_for_events(service, 1)  # though no event follows
        assert service.events == spooled(job_dir)
        recorder.close()


def test_a_disk_that_stays_full_ends_the_attempt_before_memory_is(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_UNSYNCED_BYTES", 5000)
    recorder = make(job_dir)
    for step in range(1, 20):  # where there is room that is no bound
        recorder.record("metrics", {"text": "x" * 1000}, step=step)
    recorder.sync()
    with no_room_for_events():
        for step in range(20, 24):
            recorder.record("metrics", {"text": "x" * 1000}, step=step)
        with pytest.raises(OSError, match="No space left"):
            recorder.record("metrics", {"text": "x" * 1000}, step=24)
    recorder.close()
    assert [event.step for event in spooled(job_dir)] == list(range(1, 25))


def test_events_of_a_sync_that_failed_are_written_again(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may drop what it could not write, and then the next fsync finds nothing wrong."""
    path = job_dir / "attempts" / "1" / "events.jsonl"
    spool = EventSpool(path)
    spool.append("warning", {"message": "one"}, None)
    spool.sync()
    spool.append("warning", {"message": "two"}, None)
    spool.append("warning", {"message": "three"}, None)
    lines = path.read_bytes()
    first = len(lines.split(b"\n")[0]) + 1

    def dropping(descriptor: int) -> None:
        os.pwrite(descriptor, bytes(len(lines) - first), first)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dropping)
        with pytest.raises(OSError, match="quota"):
            spool.sync()
    assert path.read_bytes() != lines
    spool.sync()
    assert path.read_bytes() == lines
    spool.close()


def test_torn_last_line_is_dropped(job_dir: Path) -> None:
    path = job_dir / "attempts" / "1" / "events.jsonl"
    spool = EventSpool(path)
    spool.append("warning", {"message": "one"}, None)
    spool.append("warning", {"message": "two"}, None)
    spool.close()
    os.truncate(path, path.stat().st_size - 5)
    spool = EventSpool(path)
    assert spool.last_seq == 1
    spool.append("warning", {"message": "two again"}, None)
    assert [e.data["message"] for e in spool.read(1, max_events=9, max_bytes=10**6)] == [
        "one",
        "two again",
    ]
    spool.close()
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(ValueError, match="jumps from 0 to 2"):
        EventSpool(path)


def test_read_keeps_to_its_bounds_but_gives_one(job_dir: Path) -> None:
    spool = EventSpool(job_dir / "events.jsonl")
    for number in range(5):
        spool.append("warning", {"message": "x" * 1000, "number": number}, None)
    assert [e.seq for e in spool.read(2, max_events=2, max_bytes=10**6)] == [2, 3]
    assert [e.seq for e in spool.read(1, max_events=9, max_bytes=2500)] == [1, 2]
    assert [e.seq for e in spool.read(4, max_events=9, max_bytes=1)] == [4]
    assert spool.read(6, max_events=9, max_bytes=10**6) == []
    spool.close()


def test_what_is_no_event_is_refused_and_takes_no_number(job_dir: Path) -> None:
    recorder = make(job_dir)
    with pytest.raises(ValidationError):
        recorder.record("gossip", {})
    with pytest.raises(PydanticSerializationError):
        recorder.record("metrics", {"loss": object()}, step=1)
    recorder.record("metrics", {"loss": float("nan"), "text": "a\u2028b\nc"}, step=1)
    events = spooled(job_dir)
    assert [event.seq for event in events] == [1]
    assert events[0].data == {"loss": None, "text": "a\u2028b\nc"}  # JSON has no NaN
    recorder.close()
