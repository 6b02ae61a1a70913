"""An attempt's side of its job's fence; `service.spec.fence` says what that is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.spec.fence import fence_lock, raise_fence, read_fence


class StaleAttempt(Exception):
    """A newer attempt of the job exists: this one may publish nothing and must end."""


class Fence:
    """One attempt's view of its job's fence."""

    def __init__(self, job_dir: Path, attempt: int) -> None:
        self.attempt = attempt
        self._job_dir = job_dir

    def take(self) -> None:
        """Makes this attempt the newest.

        Raises:
            StaleAttempt: there is a newer one already.
            TimeoutError: another process holds the lock and does not let go.
        """
        self._compare(raise_fence(self._job_dir, self.attempt))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else can take the fence or publish inside this block.

        Raises:
            StaleAttempt: this attempt is no longer the newest.
            TimeoutError: another process holds the lock and does not let go.
        """
        with fence_lock(self._job_dir):
            self.check()
            yield

    def check(self) -> None:
        """Raises StaleAttempt where a newer attempt has taken the fence."""
        self._compare(read_fence(self._job_dir))

    def _compare(self, newest: int) -> None:
        if newest > self.attempt:
            raise StaleAttempt(
                f"attempt {self.attempt} is stale: attempt {newest} of this job has taken over"
            )
