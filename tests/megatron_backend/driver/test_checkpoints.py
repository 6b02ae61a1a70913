"""The driver's side of saves: in the background, refused by the storage, copied to another one.

The ranks' state is some bytes here; files, processes, storage and errors are real ones.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from algorithms.errors import JobFailure
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.checkpoint.staging import DirectFiles, StagedFiles, Written
from megatron_backend.driver.checkpoints import JobCheckpoints
from megatron_backend.driver.job import open_job
from megatron_backend.driver.start import open_start
from service.spec import Reason
from tests.algorithms.tiny_policy import EventList
from tests.megatron_backend.driver import tiny_job

SIZE = 300_000


class SyncedEvents(EventList):
    """A recorder whose events need no disk."""

    def sync(self) -> None:
        """Nothing can be lost."""


class FileGroup:
    """Two ranks whose state is some bytes."""

    def __init__(self) -> None:
        self.state = b""
        self.loaded: list[bytes] = []
        self._memory = [StagedFiles(), StagedFiles()]

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [getattr(self, method.__name__)(rank, *args) for rank in range(2)]

    def begin_save(self, rank: int, staged: str, background: bool) -> Written | None:
        name = f"state/__{rank}_0.distcp"
        if background:
            memory = self._memory[rank]
            memory.reset(len(self.state))
            with memory.open(name) as copy:
                copy.write(self.state)
            memory.flush(Path(staged))
            return None
        files = DirectFiles(Path(staged))
        try:
            with files.open(name) as file:
                file.write(self.state)
        except OSError as error:
            return Written(files={}, error=error)
        return Written(files=files.entries)

    def save_again(self, rank: int, staged: str) -> None:
        self._memory[rank].flush(Path(staged))

    def save_result(self, rank: int, wait: bool) -> Written | None:
        return self._memory[rank].result(wait=wait)

    def load_state(self, rank: int, checkpoint: str, same_layout: bool) -> None:
        assert same_layout
        self.loaded.append(Path(checkpoint, "state", f"__{rank}_0.distcp").read_bytes())

    def close(self) -> None:
        for memory in self._memory:
            memory.close()


class Saves:
    """A job's checkpoints, with what they tell."""

    def __init__(self, folder: Path, attempt: int = 1, **spec: Any) -> None:
        if not folder.exists():
            tiny_job.write_job(folder, checkpoint=spec, parallel={"tp": 2})
        self.root = folder / "checkpoints"
        job = open_job(folder, attempt)
        fence = Fence(folder, attempt)
        fence.take()
        self.events, self.group = SyncedEvents(), FileGroup()
        start = open_start(
            job, fence, lambda text: self.events.record("warning", {"message": text})
        )
        self.checkpoints = JobCheckpoints(job, start, self.group, self.events)  # type: ignore[arg-type]

    def save(self, step: int, **options: Any) -> None:
        self.group.state = bytes([step]) * SIZE
        self.checkpoints.save(step, {"step": step}, **options)

    def latest(self) -> str:
        return (self.root / "latest").read_text().strip()

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.root.glob("step-*"))

    def resumed(self) -> int | None:
        """The step that `load_latest` gives, after a look at the state that comes with it."""
        state = self.checkpoints.load_latest()
        if state is None:
            return None
        step = int(state["step"])
        assert self.group.loaded[-2:] == [bytes([step]) * SIZE] * 2
        return step


@pytest.fixture
def open_saves(tmp_path: Path) -> Iterator[Callable[..., Saves]]:
    """Makes `Saves` of one job's folder."""
    made: list[Saves] = []

    def make(attempt: int = 1, **spec: Any) -> Saves:
        made.append(Saves(tmp_path / "job", attempt, **spec))
        return made[-1]

    yield make
    for each in made:
        each.group.close()


@contextmanager
def small_files() -> Iterator[None]:
    """The kernel refuses files of more than 100 kB to this process and its children."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def drained(saves: Saves, step: int) -> None:
    """A save, to its end."""
    saves.save(step)
    saves.checkpoints.drain()


def flushes() -> list[psutil.Process]:
    """The processes that write staged files of this one."""
    return children("megatron_backend.checkpoint.flush")


def children(module: str) -> list[psutil.Process]:
    """The processes of this one that run a module."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie, which has no command line any more
            if module in child.cmdline():
                found.append(child)
    return found


def test_a_save_and_what_it_tells(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(keep_best={"metric": "loss", "higher_is_better": False}, keep_last=1)
    assert saves.resumed() is None
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, None)):
        evaluations = [] if loss is None else [{"mode": "validation", "loss": loss}]
        saves.save(step, evaluations=evaluations)
        assert saves.latest() == f"step-{step:08d}"
    assert saves.steps() == [2, 4]
    events = saves.events.of("checkpoint")
    assert [event["score"] for event in events] == [0.5, 0.25, 0.75, None]
    assert events[-1]["path"] == str(saves.root / "step-00000004")
    assert events[-1]["layout"]["tp"] == 2
    assert events[-1]["bytes"] > 2 * SIZE
    assert saves.resumed() == 4
    assert open_saves(attempt=2).resumed() == 4


def test_d01_h06_a_checkpoint_in_the_background_counts_once_it_is_on_disk(
    open_saves: Callable[..., Saves],
) -> None:
    saves = open_saves(async_save=True, keep_last=1)
    saves.save(1)
    saves.checkpoints.drain()
    saves.save(2)
    for process in flushes():
        process.suspend()
    saves.group.state = b"trained on"  # the copy is the ranks' own
    begun = time.monotonic()
    while time.monotonic() < begun + 3:
        saves.checkpoints.poll()
        assert saves.latest() == "step-00000001"
        assert saves.steps() == [1]
        assert len(saves.events.of("checkpoint")) == 1
        time.sleep(0.2)
    for process in flushes():
        process.resume()
    saves.save(3)  # waits for the one before
    assert saves.latest() == "step-00000002"
    saves.checkpoints.drain()
    assert saves.resumed() == 3
    assert saves.steps() == [3]
    slow = saves.events.of("checkpoint")[1]
    assert slow["seconds"] >= 3
    assert slow["stall_seconds"] < slow["seconds"]
    assert slow["requested_at"] <= time.time() - slow["seconds"]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_writer_that_is_killed(open_saves: Callable[..., Saves], retries: int) -> None:
    saves = open_saves(async_save=True, save_retries=retries)
    saves.save(1)
    saves.checkpoints.drain()
    saves.save(2)
    for process in flushes():
        process.suspend()
    flushes()[0].kill()
    for process in flushes():
        process.resume()
    saves.checkpoints.drain()
    assert not list(saves.root.glob(".tmp-*"))
    if retries:
        assert saves.events.of("warning") == []
        assert saves.resumed() == 2
        return
    (warning,) = saves.events.of("warning")
    assert "step 2 could not be saved" in warning["message"]
    assert "ended with signal 9" in warning["message"]
    assert saves.latest() == "step-00000001"


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.megatron_backend.driver.test_checkpoints import Saves, flushes
saves = Saves(Path(sys.argv[1]), async_save=True, keep_last=1)
saves.save(1)
saves.checkpoints.drain()
saves.save(2)
for process in flushes():
    process.suspend()
print(*(process.pid for process in flushes()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_d01_kill_9_of_everything_during_the_flush(
    open_saves: Callable[..., Saves], tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "job")], stdout=subprocess.PIPE, check=False
    )
    assert run.returncode == -signal.SIGKILL
    orphans = [psutil.Process(int(pid)) for pid in run.stdout.split()]
    assert len(orphans) == 2
    assert len(list((tmp_path / "job" / "checkpoints").glob(".tmp-*"))) == 1
    saves = open_saves(attempt=2)
    assert saves.latest() == "step-00000001"
    assert saves.resumed() == 1
    for orphan in orphans:
        orphan.resume()
    psutil.wait_procs(orphans, timeout=60)
    assert sorted(path.name for path in saves.root.iterdir()) == ["latest", "step-00000001"]


@pytest.mark.parametrize("async_save", [False, True])
def test_d20_a_save_that_the_storage_refuses(
    open_saves: Callable[..., Saves], async_save: bool
) -> None:
    saves = open_saves(async_save=async_save, save_retries=2, max_missed=1)
    for step in range(1, 5):
        if step == 2:
            with small_files():
                saves.save(step)
                saves.checkpoints.drain()
            (warning,) = saves.events.of("warning")
            assert "step 2 could not be saved: File too large" in warning["message"]
            assert (warning["missed"], warning["tries"]) == (1, 3)
            assert saves.latest() == "step-00000001"
        else:
            saves.save(step)
            saves.checkpoints.drain()
    assert saves.steps() == [3, 4]
    assert len(saves.events.of("warning")) == 1
    with small_files():
        saves.save(5)
        saves.checkpoints.drain()
        with pytest.raises(JobFailure, match=r"File too large.*2 in a row") as failure:
            drained(saves, 6)
    assert failure.value.reason is Reason.NODE_FAILURE
    assert saves.latest() == "step-00000004"
    assert open_saves(attempt=2).resumed() == 4


def test_the_storage_is_better_at_the_second_try(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(async_save=True, save_retries=1)
    saves.save(1)
    saves.checkpoints.drain()
    with small_files():
        saves.save(2)
    saves.group.state = b"trained on"
    saves.checkpoints.drain()  # once more, from the ranks' copies
    assert saves.events.of("warning") == []
    assert saves.resumed() == 2


def test_the_storage_loses_a_file(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(async_save=True, save_retries=1)
    drained(saves, 1)
    saves.save(2)
    while flushes():
        time.sleep(0.05)
    (staged,) = saves.root.glob(".tmp-*")
    (staged / "state" / "__1_0.distcp").unlink()
    saves.checkpoints.drain()
    assert saves.events.of("warning") == []
    assert saves.resumed() == 2


def test_the_last_save_must_not_be_missed(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(save_retries=0, max_missed=10)
    with small_files(), pytest.raises(JobFailure, match="would have been the job's result"):
        saves.save(1, required=True)


def test_lost_ranks_take_their_unfinished_save_with_them(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves(async_save=True)
    saves.save(1)
    saves.checkpoints.drain()
    saves.save(2)
    assert saves.resumed() == 1  # as after a restart of the ranks
    saves.checkpoints.drain()
    saves.save(2)
    saves.checkpoints.drain()
    assert saves.resumed() == 2
    assert not list(saves.root.glob(".tmp-*"))


def test_the_newest_is_damaged(open_saves: Callable[..., Saves]) -> None:
    saves = open_saves()
    for step in (1, 2):
        saves.save(step)
    shard = saves.root / "step-00000002" / "state" / "__1_0.distcp"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    again = open_saves(attempt=2)
    assert again.resumed() == 1
    (warning,) = again.events.of("warning")
    assert "step-00000002 is damaged and was set aside" in warning["message"]


def test_a_checkpoint_of_another_release_ends_the_attempt(
    open_saves: Callable[..., Saves],
) -> None:
    saves = open_saves()
    saves.save(1)
    path = saves.root / "step-00000001" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(JobFailure, match="written by another release") as failure:
        open_saves(attempt=2)
    assert failure.value.reason is Reason.USER_ERROR
    assert saves.steps() == [1]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Address of an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty bucket, and the environment that leads to it."""
    import boto3

    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-storage",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = boto3.resource("s3").Bucket("planish-tests")
    found.create()
    yield found
    found.objects.delete()
    found.delete()


def copies(bucket: Any) -> dict[str, int]:
    """How many objects each copied checkpoint has."""
    names = [key.key.split("/") for key in bucket.objects.all()]
    assert all(name[:2] == ["runs", "job-1"] for name in names)
    steps = [name[2] for name in names]
    return {step: steps.count(step) for step in sorted(set(steps))}


def credentials(bucket: Any) -> None:
    """What the service gives each attempt anew."""
    client = bucket.meta.client
    os.environ["AWS_ENDPOINT_URL"] = client.meta.endpoint_url
    os.environ["AWS_ACCESS_KEY_ID"] = "key"
    os.environ["AWS_SECRET_ACCESS_KEY"] = "secret-of-the-storage"


def test_a_job_without_its_disk_goes_on_from_the_storage(
    open_saves: Callable[..., Saves], bucket: Any
) -> None:
    saves = open_saves(
        storage="s3://planish-tests/runs",
        keep_last=1,
        keep_best={"metric": "accuracy"},
        async_save=True,
    )
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ  # neither ranks nor environments see it
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25)):
        saves.save(step, evaluations=[{"accuracy": accuracy}])
    saves.checkpoints.drain()
    files = sum(1 for path in (saves.root / "step-00000003").rglob("*") if path.is_file())
    assert copies(bucket) == {"step-00000002": files, "step-00000003": files}

    shutil.rmtree(saves.root)
    credentials(bucket)
    again = open_saves(attempt=2)
    assert again.resumed() == 3
    again.save(4)
    again.checkpoints.drain()
    assert list(copies(bucket)) == ["step-00000002", "step-00000004"]  # the best is known still
    assert again.latest() == "step-00000004"

    shutil.rmtree(again.root)
    name = next(key for key in bucket.objects.filter(Prefix="runs/job-1/step-00000004/state"))
    name.put(Body=b"damaged")
    credentials(bucket)
    third = open_saves(attempt=3)
    assert third.resumed() == 2
    (warning,) = third.events.of("warning")
    assert "step-00000004 is damaged" in warning["message"]
    third.save(3)
    third.checkpoints.drain()  # a damaged copy takes no place from a good one
    assert list(copies(bucket)) == ["step-00000002", "step-00000003", "step-00000004"]


def test_d20_a_copy_that_the_storage_refuses(open_saves: Callable[..., Saves], bucket: Any) -> None:
    saves = open_saves(storage="s3://planish-tests/runs", save_retries=0, max_missed=1)
    bucket.delete()
    saves.save(1)
    saves.checkpoints.drain()
    (warning,) = saves.events.of("warning")
    assert "step 1 could not be copied to the storage" in warning["message"]
    assert "secret-of-the-storage" not in json.dumps(saves.events.events)
    assert saves.latest() == "step-00000001"  # the folder has it all the same
    bucket.create()
    saves.save(2)
    saves.checkpoints.drain()
    assert list(copies(bucket)) == ["step-00000002"]
    bucket.objects.delete()
    bucket.delete()
    saves.save(3)
    saves.checkpoints.drain()
    assert len(saves.events.of("warning")) == 2  # not two in a row
    saves.save(4)
    with pytest.raises(JobFailure, match="2 in a row"):
        saves.checkpoints.drain()
    bucket.create()


def test_a_checkpoint_that_a_dead_driver_did_not_copy(
    open_saves: Callable[..., Saves], bucket: Any
) -> None:
    saves = open_saves(storage="s3://planish-tests/runs", save_retries=0)
    saves.save(1)
    (copy,) = children("megatron_backend.checkpoint.transfer")
    copy.kill()
    saves.checkpoints.drain()
    assert copies(bucket) == {}
    credentials(bucket)
    again = open_saves(attempt=2)
    assert again.resumed() == 1
    again.checkpoints.drain()
    assert again.events.of("warning") == []
    assert list(copies(bucket)) == ["step-00000001"]
    (first, *_) = bucket.objects.all()
    credentials(bucket)
    third = open_saves(attempt=3)
    third.checkpoints.drain()
    assert next(iter(bucket.objects.all())).last_modified == first.last_modified  # not once more


COPYING = """
import os, signal, sys, time
from pathlib import Path
from tests.megatron_backend.driver.test_checkpoints import Saves, children
saves = Saves(Path(sys.argv[1]), storage="s3://planish-tests/runs")
saves.save(1)
(copy,) = children("megatron_backend.checkpoint.transfer")
copy.suspend()
print(copy.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_copy_ends_with_its_driver(bucket: Any, tmp_path: Path) -> None:
    job = tmp_path / "job"
    run = subprocess.run(
        [sys.executable, "-c", COPYING, str(job)], stdout=subprocess.PIPE, check=False
    )
    assert run.returncode == -signal.SIGKILL
    assert (job / "checkpoints" / "latest").read_text() == "step-00000001\n"
    orphan = psutil.Process(int(run.stdout))
    orphan.resume()
    assert not psutil.wait_procs([orphan], timeout=60)[1]
    assert copies(bucket) == {}


def test_a_copy_outlives_a_signal_to_the_drivers_group(
    open_saves: Callable[..., Saves], bucket: Any
) -> None:
    saves = open_saves(storage="s3://planish-tests/runs")
    saves.save(1)
    (copy,) = children("megatron_backend.checkpoint.transfer")
    assert os.getpgid(copy.pid) != os.getpgrp()
    saves.checkpoints.drain()
    assert list(copies(bucket)) == ["step-00000001"]
