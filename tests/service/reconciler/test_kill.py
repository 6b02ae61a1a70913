"""The service is killed (SIGKILL) at many lines of its own code, and started again."""

import multiprocessing
import shutil
import signal
from pathlib import Path

import pytest

from service.jobs import Job, JobFolder, JobState
from service.store import Store
from tests.service.reconciler.killed_service import run_service
from tests.service.reconciler.services import moves, starts, worker_events
from tests.service.store.sample_jobs import context, document

# The first attempt dies after it left events in its spool, the second ends well.
BEHAVIOURS = ["events=3", "die-first", "succeed"]
POINTS = 20
SECONDS = 120
"""A service that has not ended the job by then has lost it."""


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """Forks from a process that has imported everything, so that a service starts in no time."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        ["tests.service.reconciler.killed_service", "alembic.command", "alembic.config"]
    )
    return found


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """A data folder with one job that nobody has looked at."""
    folder = tmp_path_factory.mktemp("submitted")
    store = Store.open(f"sqlite:///{folder}/planish.db")
    spec = document()
    job, _ = store.jobs.create(context(spec), spec)
    store.close()
    return folder, job


class Services:
    """Runs services one after the other on a copy of the data folder."""

    def __init__(
        self,
        processes: multiprocessing.context.ForkServerContext,
        submitted: tuple[Path, Job],
        folder: Path,
    ) -> None:
        self.folder = folder
        self._template, self.job = submitted
        self._processes = processes
        self.reset()

    def reset(self) -> None:
        """A fresh copy."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._template, self.folder)

    def run(self, kill_at: int | None) -> bool:
        """Runs one until it is killed or its job has ended; tells whether it was killed."""
        arguments = (self.folder, self.job.id, BEHAVIOURS, kill_at)
        process = self._processes.Process(target=run_service, args=arguments)
        process.start()
        process.join(SECONDS)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), f"killed at {kill_at}: see stderr"
        return process.exitcode != 0

    def check(self, where: object) -> None:
        """The job ended well, nothing of it is lost, and each attempt was started once."""
        store = Store.open(f"sqlite:///{self.folder}/planish.db")
        try:
            ended = store.jobs.get(self.job.id)
            assert ended.state is JobState.SUCCEEDED, where
            path = JobFolder(self.folder / "jobs" / self.job.id).path
            assert starts(path) == ["1", "2"], where
            expected = [(attempt, seq) for attempt in (1, 2) for seq in (1, 2, 3)]
            assert worker_events(store, self.job) == expected, where
            assert moves(store, self.job) == [
                *("QUEUED", "STARTING", "RUNNING", "RECOVERING"),
                *("STARTING", "RUNNING", "SUCCEEDED"),
            ], where
            assert ended.lock_token is None, where
        finally:
            store.close()


@pytest.fixture
def services(
    processes: multiprocessing.context.ForkServerContext,
    submitted: tuple[Path, Job],
    tmp_path: Path,
) -> Services:
    return Services(processes, submitted, tmp_path / "data")


@pytest.mark.slow
def test_a_service_killed_at_any_line_loses_nothing_and_starts_nothing_twice(
    services: Services,
) -> None:
    assert not services.run(kill_at=None)
    services.check("not killed at all")
    lines = int((services.folder / "lines").read_text())
    assert lines > 1000
    killed = 0
    for point in range(POINTS):
        kill_at = 1 + point * lines // POINTS
        services.reset()
        killed += services.run(kill_at)
        services.run(kill_at=None)
        services.check(f"killed at line {kill_at} of {lines}")
    # How often the driver is polled differs from run to run, so the last points may be missed.
    assert killed > POINTS // 2


@pytest.mark.slow
def test_a_service_killed_again_and_again_gets_there(services: Services) -> None:
    kills = 0
    while services.run(kill_at=400 + 100 * kills):
        kills += 1
    assert kills >= 3
    services.check(f"killed {kills} times")
