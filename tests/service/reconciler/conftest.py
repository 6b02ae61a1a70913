import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.jobs import Job
from service.launchers.local import LocalLauncher
from service.launchers.processes import marked, send
from service.reconciler import Reconciler, Timing
from service.store import Store
from tests.service.reconciler.services import DRIVER
from tests.service.store.sample_jobs import context, document


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/planish.db")
    yield opened
    for job in opened.jobs.page(limit=1000).items:
        for attempt in opened.attempts.of_job(job.id):
            for process in marked(job.id, attempt.number):
                send(process, signal.SIGKILL)
        scrubbed = tmp_path / "jobs" / job.id / "children"
        if scrubbed.exists():
            for pid in scrubbed.read_text().split():
                if os.path.exists(f"/proc/{pid}"):
                    os.kill(int(pid), signal.SIGKILL)
    opened.close()


@pytest.fixture
def submit(store: Store) -> Callable[..., Job]:
    """Stores a job; keywords are parts of its document."""

    def create(**parts: object) -> Job:
        spec = document(**parts)
        return store.jobs.create(context(spec), spec)[0]

    return create


@pytest.fixture
def serve(store: Store, tmp_path: Path) -> Iterator[Callable[..., Reconciler]]:
    """Starts reconcilers whose driver does what `behaviours` say; stops them at the end."""
    started: list[Reconciler] = []

    def start(
        *behaviours: str, capacity: int = 10, grace: float = 20.0, retry_base: float = 0.02
    ) -> Reconciler:
        launcher = LocalLauncher(
            tmp_path / "jobs",
            capacity=capacity,
            command=[sys.executable, "-I", "-S", str(DRIVER), *behaviours],
            poll_seconds=0.02,
        )
        timing = Timing(sweep=0.05, lease=5.0, grace=grace, retry_base=retry_base)
        reconciler = Reconciler(
            store, {"local": launcher}, tmp_path / "jobs", "http://127.0.0.1:1", timing=timing
        )
        reconciler.start()
        started.append(reconciler)
        return reconciler

    yield start
    for reconciler in started:
        reconciler.stop()
