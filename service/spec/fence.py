"""The fence of a job: of several attempts that are alive, only the newest may publish.

A cluster can declare a node failed while its processes still run (SLURM does), so the next attempt
may start beside the old one. JOB_DIR/fence holds the newest attempt's number; the service raises it
before it launches, and a driver raises it if it is behind. Checking the number and then renaming a
folder would leave a gap in which a new attempt could start and read the old state. So whoever
raises the fence and whoever publishes hold one lock, JOB_DIR/fence.lock: raising waits for a
publish that is under way, and nothing is published after that. The number never goes down.

The lock is `flock` on a file of its own that is opened for writing and never deleted or replaced.
On a local disk the kernel lets go of it when its holder dies, however it dies. On NFS Linux turns
it into a lock of the server's, which holds between machines, provided that the file is open for
writing (a folder cannot be) and the mount has locking (NFS 4, or 3 without `nolock`); a machine
that vanished keeps such a lock until the server's lease for it is over, about 90 seconds.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.spec.durable import replace_text

LOCK_WAIT_SECONDS = 120.0
"""A publish holds the lock for a few renames; longer means that its process is stopped, or that
its machine is gone and the file server has not noticed yet."""


def read_fence(job_dir: Path) -> int:
    """Number of the newest attempt; 0 before the first.

    Raises:
        ValueError: the file holds no number.
    """
    path = job_dir / "fence"
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return 0
    if not text.isdecimal():
        raise ValueError(f"{path} must hold an attempt's number, and holds {text!r}")
    return int(text)


def raise_fence(job_dir: Path, attempt: int) -> int:
    """Shuts out every attempt older than `attempt`, and says which is the newest now.

    Raises:
        TimeoutError: another process holds the lock and does not let go.
    """
    with fence_lock(job_dir):
        newest = read_fence(job_dir)
        if newest < attempt:
            replace_text(job_dir / "fence", f"{attempt}\n")
        return max(newest, attempt)


@contextmanager
def fence_lock(job_dir: Path) -> Iterator[None]:
    """Nobody else raises this job's fence or publishes inside this block.

    Raises:
        TimeoutError: another process holds the lock and does not let go.
    """
    with exclusive_lock(job_dir / "fence.lock", wait_seconds=LOCK_WAIT_SECONDS):
        yield


@contextmanager
def exclusive_lock(path: Path, *, wait_seconds: float) -> Iterator[int]:
    """Holds a lock file, and gives its descriptor; see above for what that means where.

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
        yield descriptor
    finally:
        os.close(descriptor)
