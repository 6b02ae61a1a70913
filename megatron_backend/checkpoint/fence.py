"""The fence: of several attempts of one job that are alive, only the newest may publish.

A cluster can declare a node failed while its processes still run (SLURM does), so the next attempt
may start beside the old one. JOB_DIR/fence holds the newest attempt's number; the service writes it
before it launches, and a driver raises it if it is behind. Checking the number and then renaming a
folder would leave a gap in which a new attempt could start and read the old state, so both happen
under one lock, `fence.lock`: whoever takes the fence waits for a publish that is under way, and
nothing is published after that.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_backend.checkpoint.durable import replace_text

LOCK_WAIT_SECONDS = 60.0
"""A publish holds the lock for a few renames; longer means that its process is stopped."""


class StaleAttempt(Exception):
    """A newer attempt of the job exists: this one may publish nothing and must end."""


class Fence:
    """One attempt's view of its job's fence."""

    def __init__(self, job_dir: Path, attempt: int) -> None:
        self.attempt = attempt
        self._file = job_dir / "fence"
        self._lock = job_dir / "fence.lock"

    def take(self) -> None:
        """Makes this attempt the newest.

        Raises:
            StaleAttempt: there is a newer one already.
            TimeoutError: another process holds the lock and does not let go.
        """
        with self.held():
            replace_text(self._file, f"{self.attempt}\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else can take the fence or publish inside this block.

        Raises:
            StaleAttempt: this attempt is no longer the newest.
            TimeoutError: another process holds the lock and does not let go.
        """
        with exclusive_lock(self._lock, wait_seconds=LOCK_WAIT_SECONDS):
            self.check()
            yield

    def check(self) -> None:
        """Raises StaleAttempt where a newer attempt has taken the fence."""
        newest = self._newest()
        if newest > self.attempt:
            raise StaleAttempt(
                f"attempt {self.attempt} is stale: attempt {newest} of this job has taken over"
            )

    def _newest(self) -> int:
        try:
            text = self._file.read_text().strip()
        except FileNotFoundError:
            return 0
        if not text.isdecimal():
            raise ValueError(f"{self._file} must hold an attempt's number, and holds {text!r}")
        return int(text)


@contextmanager
def exclusive_lock(path: Path, *, wait_seconds: float) -> Iterator[None]:
    """Holds a lock file; the kernel lets go of it when the process dies, however it dies.

    Raises:
        TimeoutError: another process held it all the time.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{path} is locked by another process (a driver of the same job?); "
                        "end that process and start again"
                    ) from None
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)
