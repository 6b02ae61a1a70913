import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.publish import CheckpointStore, Owner
from megatron_backend.checkpoint.remote import RemoteCheckpoints
from megatron_backend.checkpoint.retention import Retention


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    fence = Fence(tmp_path, 1)
    fence.take()
    store = CheckpointStore(tmp_path, fence, Owner(job="job-1", model="0"))
    store.open()
    return store


@contextmanager
def silent_storage(
    job_dir: Path, *, deadline: float
) -> Iterator[tuple[RemoteCheckpoints, socket.socket]]:
    """A storage that takes connections and never answers, and the socket it listens on."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        remote = RemoteCheckpoints(
            "s3://bucket/job-1",
            job_dir=job_dir,
            attempt=1,
            retention=Retention(last=1),
            deadline=deadline,
            environment=os.environ
            | {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
            },
        )
        yield remote, silent


def test_d21_a_storage_that_never_answers_holds_up_nobody_for_ever(
    tmp_path: Path, store: CheckpointStore
) -> None:
    with (
        silent_storage(tmp_path, deadline=3.0) as (remote, _),
        pytest.raises(OSError, match="no end within 3 s") as caught,
    ):
        remote.fetch_newest(store, pytest.fail)
    assert caught.value.errno == errno.ETIMEDOUT


class Told(BaseException):
    """What a signal's handler raises."""


def test_a_driver_that_is_told_to_end_leaves_no_copying_behind(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []
    timers: list[threading.Timer] = []

    class KeptProcess(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            children.append(self)

    class KeptTimer(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    def told(_number: int, _frame: FrameType | None) -> None:
        raise Told

    def tell(silent: socket.socket) -> None:
        """Once the process has connected, so that the driver waits for its answer."""
        connection, _ = silent.accept()
        with connection:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            connection.settimeout(60.0)
            while connection.recv(4096):  # until the process has ended
                pass

    monkeypatch.setattr(subprocess, "Popen", KeptProcess)
    monkeypatch.setattr(threading, "Timer", KeptTimer)
    before = signal.signal(signal.SIGUSR2, told)
    try:
        with silent_storage(tmp_path, deadline=600.0) as (remote, silent):
            telling = threading.Thread(target=tell, args=(silent,), daemon=True)
            telling.start()
            with pytest.raises(Told):
                remote.fetch_newest(store, pytest.fail)
            telling.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    (child,), (timer,) = children, timers
    assert child.returncode == -signal.SIGKILL
    timer.join(10.0)
    assert not timer.is_alive()
