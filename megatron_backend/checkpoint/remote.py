"""A job's checkpoints in a storage beside its folder (`checkpoint.storage`).

The folder stays the place where a checkpoint is published and loaded; the storage holds copies of
what was published, so that a job whose folder is empty (another machine, a lost disk) goes on from
there. Whether an attempt may write is decided by the fence in the folder, which all attempts share.

Copying is done by a process of its own (`megatron_backend.checkpoint.transfer`), which takes no
time from training and cannot hang the driver. That process alone gets the storage's credentials:
they are taken out of the driver's environment before ranks, Ray or a user's environment start.

Free of torch.
"""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from megatron_backend.checkpoint.durable import fsync_tree
from megatron_backend.checkpoint.manifest import CorruptCheckpoint
from megatron_backend.checkpoint.publish import CheckpointStore, Published
from megatron_backend.checkpoint.retention import Retention
from megatron_backend.signals import signals_blocked
from service.spec.attempt import step_name


class RemoteCheckpoints:
    """The copies of one job's checkpoints.

    Args:
        url: `s3://BUCKET/PREFIX/JOB`.
        job_dir: has the fence.
        attempt: this one.
        retention: which copies stay.
        deadline: seconds that one copy may take.
        environment: of the processes that copy.
    """

    def __init__(
        self,
        url: str,
        *,
        job_dir: Path,
        attempt: int,
        retention: Retention,
        deadline: float,
        environment: Mapping[str, str],
    ) -> None:
        self.url = url
        self._job_dir, self._attempt, self._retention = job_dir, attempt, retention
        self._deadline, self._environment = deadline, environment

    @staticmethod
    def take_credentials(environment: MutableMapping[str, str]) -> dict[str, str]:
        """Takes the storage's settings out of an environment; a copy that still has them."""
        whole = dict(environment)
        for name in whole:
            if name.startswith("AWS_"):
                del environment[name]
        return whole

    def upload(self, published: Published) -> "Upload":
        """Starts to copy a checkpoint, and then deletes the copies that need not stay."""
        best = self._retention.best
        return Upload(
            {
                "do": "upload",
                "url": self.url,
                "folder": str(published.path),
                "job_dir": str(self._job_dir),
                "attempt": self._attempt,
                "last": self._retention.last,
                "every": self._retention.every,
                "best": None if best is None else best.model_dump(mode="json"),
            },
            self._environment,
            self._deadline,
        )

    def fetch_newest(self, store: CheckpointStore, warn: Callable[[str], None]) -> Published | None:
        """Publishes the newest copy in the job's folder; None where the storage has none.

        One that does not verify stays where it is; `warn` is told, and the one before it is used.

        Raises:
            StaleAttempt: a newer attempt has taken over.
            RefusedCheckpoint: the newest is of another release, job or model.
            OSError: the storage cannot be read.
        """
        for step in reversed(self._ask({"do": "list"})["steps"]):
            staged = store.stage(step)
            try:
                self._ask({"do": "download", "step": step, "folder": str(staged)})
                manifest = store.verify(staged)
                fsync_tree(staged)
                return store.admit(staged, manifest, self._retention)
            except CorruptCheckpoint as error:
                warn(f"the copy {self.url}/{step_name(step)} is damaged: {error}")
            finally:
                store.discard(staged)  # what was published has another name by now
        return None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        whole = {**request, "url": self.url}
        return _Transfer(whole, self._environment, self._deadline).answer()


class _Transfer:
    """A process that copies, for `deadline` seconds at most."""

    def __init__(
        self, request: Mapping[str, Any], environment: Mapping[str, str], deadline: float
    ) -> None:
        self.request, self.environment, self.deadline = request, environment, deadline
        self._ends = time.monotonic() + deadline
        with signals_blocked():  # a SIGTERM leaves it time to finish
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_backend.checkpoint.transfer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                process_group=0,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died already; `answer` says so
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()  # and stays open: its end is the driver's

    @property
    def running(self) -> bool:
        """Whether there is still something to wait for; one that is over its time has ended."""
        return self._process.poll() is None and time.monotonic() < self._ends

    def answer(self) -> dict[str, Any]:
        """Waits for the end.

        Raises:
            OSError: the storage refused or did not answer in time, or the process was killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        over_time = threading.Timer(max(0.0, self._ends - time.monotonic()), self._process.kill)
        over_time.daemon = True
        try:
            over_time.start()
            with self._process.stdout as stdout:
                text = stdout.read()
            code = self._process.wait()
        except BaseException:  # the driver was told to end: nobody waits for the copy any more
            self._process.kill()
            self._process.wait()
            raise
        finally:
            over_time.cancel()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        # Any number that says "storage": an attempt that ends for it is one that is tried again.
        if code != 0 and time.monotonic() >= self._ends:
            words = f"{self.request['url']}: no end within {self.deadline:g} s"
            raise OSError(errno.ETIMEDOUT, words)
        if code != 0:
            words = f"the process that copies to the storage ended with code {code}"
            raise OSError(errno.EIO, words)
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise OSError(errno.EIO, f"{self.request['url']}: {answer['error']}")
        return answer


class Upload:
    """A checkpoint on its way to the storage."""

    def __init__(
        self, request: Mapping[str, Any], environment: Mapping[str, str], deadline: float
    ) -> None:
        self._transfer = _Transfer(request, environment, deadline)

    def finished(self, *, wait: bool) -> bool:
        """Whether it is there.

        Raises:
            OSError: the storage refused or did not answer in time, or the process was killed.
        """
        if not wait and self._transfer.running:
            return False
        self._transfer.answer()
        return True

    def again(self) -> Self:
        """Starts anew, after a failure."""
        old = self._transfer
        return type(self)(old.request, old.environment, old.deadline)


def open_remote(
    storage: str | None,
    *,
    job_id: str,
    job_dir: Path,
    attempt: int,
    retention: Retention,
    deadline: float,
) -> RemoteCheckpoints | None:
    """The copies in a job's storage, where it has one."""
    environment = RemoteCheckpoints.take_credentials(os.environ)
    if storage is None:
        return None
    return RemoteCheckpoints(
        f"{storage.rstrip('/')}/{job_id}",
        job_dir=job_dir,
        attempt=attempt,
        retention=retention,
        deadline=deadline,
        environment=environment,
    )
