"""What a conformance test does with a site: make jobs, watch attempts, wait."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from service.jobs import new_job_id
from service.launchers import (
    Launcher,
    LauncherUnavailable,
    LaunchRequest,
    Observation,
    Phase,
)
from tests import waiting
from tests.cluster.sites.site import Site
from tests.service.store.sample_jobs import context, document

SILENCE_SECONDS = 1.5
"""A child that lives touches its file ten times within it, unless the machine is very busy."""


def wait_until[Found](look: Callable[[], Found | None], what: str, seconds: float) -> Found:
    """As `waiting.wait_until`, but a cluster that is away is asked again."""
    refusals: list[LauncherUnavailable] = []

    def asked() -> Found | None:
        try:
            return look()
        except LauncherUnavailable as error:
            refusals.append(error)
            return None

    def answers() -> str:
        return "\n".join(dict.fromkeys(map(str, refusals))) or "The cluster answered each time."

    return waiting.wait_until(asked, what, seconds, details=answers)


@dataclass(slots=True)
class Trial:
    """One test's jobs on a site."""

    site: Site
    jobs_dir: Path
    attempts: list[tuple[str, int]] = field(default_factory=list)
    """Each (job, attempt) that may have been started."""

    @classmethod
    @contextmanager
    def on(cls, site: Site) -> Iterator[Self]:
        """An empty one; at the block's end all its attempts are ended."""
        mask = os.umask(0)  # drivers may be of another user than the tests
        folder = Path(tempfile.mkdtemp(prefix="t", dir=site.folder))
        folder.chmod(0o777)
        made = cls(site, folder / "jobs")
        made.jobs_dir.mkdir()
        try:
            yield made
        finally:
            try:
                made.end_all()
            finally:
                os.umask(mask)

    def job(self, *behaviours: str, **resources: Any) -> LaunchRequest:
        """Attempt 1 of a new job whose driver does as told; `resources` add to the site's."""
        spec = document(resources={**self.site.resources, **resources})
        resolved = context(spec, new_job_id())
        self.behave(resolved.job_id, *behaviours)
        self.attempts.append((resolved.job_id, 1))
        return LaunchRequest(
            job_id=resolved.job_id,
            attempt=1,
            job_dir=self.folder(resolved.job_id),
            context=resolved,
        )

    def folder(self, job_id: str) -> Path:
        return self.jobs_dir / job_id

    def behave(self, job_id: str, *behaviours: str) -> None:
        """Tells the drivers of a job what to do (see `driver.py`)."""
        self.folder(job_id).mkdir()
        (self.folder(job_id) / "behave").write_text("\n".join(behaviours) + "\n")

    def go(self, job_id: str, attempt: int | None = None) -> None:
        """Ends the waiting of a job's driver."""
        (self.folder(job_id) / ("go" if attempt is None else f"go-{attempt}")).touch()

    def starts(self, job_id: str) -> list[str]:
        """The attempts whose drivers got to work, in order."""
        path = self.folder(job_id) / "starts"
        return path.read_text().split() if path.exists() else []

    def working(self, job_id: str) -> bool:
        """Whether a driver of the job got to work, and its children live."""
        folder = self.folder(job_id)
        told = (folder / "behave").read_text()
        return bool(self.starts(job_id)) and (
            "children" not in told or (folder / "children").exists()
        )

    def log(self, job_id: str, attempt: int = 1) -> list[str]:
        """The lines of an attempt's log."""
        path = self.folder(job_id) / f"attempts/{attempt}/log"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def submit(self, launcher: Launcher, request: LaunchRequest) -> str:
        """Submits until the cluster answers."""
        wait_until(lambda: _answered(launcher, request), "submitted", self.site.patience.start)
        return launcher.identify(request.job_id, request.attempt)

    def wait_started(self, launcher: Launcher, launcher_id: str, job_id: str) -> None:
        """Until the driver works and the launcher says so."""
        patience = self.site.patience.start

        def running() -> bool:
            seen = launcher.poll(launcher_id)
            assert seen.phase is not Phase.EXITED, f"{seen}; its log: {self.log(job_id)}"
            return seen.phase is Phase.RUNNING and self.working(job_id)

        wait_until(running, "the driver runs", patience)

    def wait_exited(self, launcher: Launcher, launcher_id: str) -> Observation:
        """Until nothing of the attempt is left; ends what its driver left, as the service does.

        The attempt may not have started yet.
        """
        patience = self.site.patience.start + self.site.patience.end

        def gone() -> Observation | None:
            seen = launcher.poll(launcher_id)
            if seen.phase is Phase.EXITED and seen.leftovers:
                launcher.cancel(launcher_id, 0.0)
            return seen if seen.phase is Phase.EXITED and not seen.leftovers else None

        return wait_until(gone, f"{launcher_id} has ended", patience)

    def cancel(self, launcher: Launcher, launcher_id: str, grace_seconds: float) -> Observation:
        """Cancels as the service does: again and again, with what is left of the grace."""
        over = time.monotonic() + grace_seconds

        def gone() -> Observation | None:
            launcher.cancel(launcher_id, max(0.0, over - time.monotonic()))
            seen = launcher.poll(launcher_id)
            return seen if seen.phase is Phase.EXITED and not seen.leftovers else None

        return wait_until(
            gone, f"{launcher_id} was cancelled", grace_seconds + self.site.patience.end
        )

    def assert_children_ended(self, job_id: str) -> None:
        """No child of the job's drivers shows a sign of life."""
        beats = list((self.folder(job_id) / "beats").iterdir())
        assert beats, "no child ever lived"
        wait_until(
            lambda: all(time.time() - os.stat(beat).st_mtime > SILENCE_SECONDS for beat in beats),
            "the driver's children have ended",
            30,
        )

    def end_all(self) -> None:
        """Nothing of the test is left on the site afterwards."""
        launcher = self.site.launcher(self.jobs_dir)
        try:
            ids = [launcher.identify(job_id, attempt) for job_id, attempt in self.attempts]
            for launcher_id in ids:
                wait_until(lambda i=launcher_id: _cancelled(launcher, i), "cancelled", 60)  # type: ignore[misc]
            for launcher_id in ids:
                self.cancel(launcher, launcher_id, 0.0)
        finally:
            launcher.close()


def _answered(launcher: Launcher, request: LaunchRequest) -> bool:
    launcher.submit(request)
    return True


def _cancelled(launcher: Launcher, launcher_id: str) -> bool:
    launcher.cancel(launcher_id, 0.0)
    return True
