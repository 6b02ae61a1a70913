"""A server that is killed between writing an attempt down and submitting it, in the middle of the
submission, and just after it: another one goes on, and every driver was started once."""

import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.jobs import JobState
from service.reconciler import Reconciler, Timing
from service.store import Store
from tests.cluster.conformance.killed_server import AFTER, serve_until_killed
from tests.cluster.conformance.trial import Trial, wait_until
from tests.cluster.sites.site import Site
from tests.service.store.sample_jobs import document

LINES = (1, 8, 25, AFTER)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/planish.db")
    yield opened
    opened.close()


@pytest.mark.slow
def test_a_server_killed_around_a_submission_starts_nothing_twice(
    site: Site, trial: Trial, store: Store, tmp_path: Path
) -> None:
    name = str(site.resources.get("cluster", "local"))
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.cluster.conformance.killed_server"])
    url, jobs = f"sqlite:///{tmp_path}/planish.db", []
    for line in LINES:
        request = trial.job("succeed")
        jobs.append(store.jobs.create(request.context, document(resources=site.resources))[0])
        server = processes.Process(
            target=serve_until_killed,
            args=(site.cluster, name, url, trial.jobs_dir, jobs[-1].id, line),
        )
        server.start()
        server.join(site.patience.start)
        server.kill()
        server.join()
        assert server.exitcode == -signal.SIGKILL
        assert store.jobs.get(jobs[-1].id).state is JobState.STARTING, f"killed at line {line}"
    launcher = site.launcher(trial.jobs_dir)
    last = Reconciler(
        store,
        {name: launcher},
        trial.jobs_dir,
        "http://127.0.0.1:1",
        timing=Timing(sweep=0.1, lease=0.5),
    )
    last.start()
    try:
        for job in jobs:
            wait_until(
                lambda job=job: store.jobs.get(job.id).state.terminal,  # type: ignore[misc]
                f"{job.id} has ended",
                site.patience.start + site.patience.end,
            )
    finally:
        last.stop()
        launcher.close()
    for line, job in zip(LINES, jobs, strict=True):
        ended = store.jobs.get(job.id)
        assert ended.state is JobState.SUCCEEDED, f"killed at line {line}: {ended.message}"
        assert ended.attempt_count == 1, f"killed at line {line}"
        assert trial.starts(job.id) == ["1"], f"killed at line {line}"
