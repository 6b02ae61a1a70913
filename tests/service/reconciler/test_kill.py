"""The service is killed (SIGKILL) at many lines of its own code, and started again."""

import multiprocessing
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
AT_ONCE = 5
"""Most of a job's time is waiting: for a driver, a lease, a retry."""
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
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder whose database has its tables; to make them anew takes longer than a test."""
    folder = tmp_path_factory.mktemp("empty")
    Store.open(f"sqlite:///{folder}/planish.db").close()
    return folder


class Services:
    """Runs services one after the other on a data folder with one job that nobody has looked at.

    The job is the folder's own: a service finds an attempt's processes on the whole machine by the
    job's id, so another folder's service would end those of a copy.
    """

    def __init__(
        self,
        processes: multiprocessing.context.ForkServerContext,
        empty: Path,
        folder: Path,
    ) -> None:
        self.folder = folder
        self._processes = processes
        shutil.copytree(empty, folder)
        store = Store.open(f"sqlite:///{folder}/planish.db")
        spec = document()
        self.job: Job = store.jobs.create(context(spec), spec)[0]
        store.close()

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


type NewServices = Callable[[str], Services]


@pytest.fixture
def new_services(
    processes: multiprocessing.context.ForkServerContext,
    empty: Path,
    tmp_path: Path,
) -> NewServices:
    """Makes `Services` by the name of their folder."""
    return lambda name: Services(processes, empty, tmp_path / name)


@pytest.mark.slow
def test_a_service_killed_at_any_line_loses_nothing_and_starts_nothing_twice(
    new_services: NewServices,
) -> None:
    def lines_of_a_whole_run(number: int) -> int:
        whole = new_services(f"whole-{number}")
        assert not whole.run(kill_at=None)
        whole.check("not killed at all")
        return int((whole.folder / "lines").read_text())

    # How often the driver is polled differs from run to run.
    lines = min(map(lines_of_a_whole_run, range(2)))
    assert lines > 1000

    def kill_and_go_on(kill_at: int) -> bool:
        services = new_services(f"killed-at-{kill_at}")
        killed = services.run(kill_at)
        services.run(kill_at=None)
        services.check(f"killed at line {kill_at} of {lines}")
        return killed

    with ThreadPoolExecutor(AT_ONCE) as threads:
        points = [1 + point * lines // POINTS for point in range(POINTS)]
        killed = sum(threads.map(kill_and_go_on, points))
    # A run that is shorter than those two does not come to the last points.
    assert killed > POINTS // 2


def test_a_service_killed_again_and_again_gets_there(new_services: NewServices) -> None:
    services, kills = new_services("data"), 0
    while services.run(kill_at=400 + 100 * kills):
        kills += 1
    assert kills >= 3
    services.check(f"killed {kills} times")
