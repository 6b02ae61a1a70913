import sys
import threading
from collections.abc import Callable
from pathlib import Path

from service.jobs import Job, JobFolder, JobState
from service.launchers.local import LocalLauncher
from service.reconciler import Reconciler, Timing
from service.store import Store
from tests.service.reconciler.services import (
    DRIVER,
    moves,
    starts,
    wait_for_state,
    worker_events,
)


def test_two_services_on_one_database_start_each_attempt_once(
    store: Store, submit: Callable[..., Job], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/planish.db"
    command = [sys.executable, "-I", "-S", str(DRIVER), "events=5", "die-first", "succeed"]
    stores = [Store.open(url) for _ in range(2)]
    services = [
        Reconciler(
            each,
            {"local": LocalLauncher(tmp_path / "jobs", capacity=2, command=command)},
            tmp_path / "jobs",
            "http://127.0.0.1:1",
            # Claims run out at once, so each works on what the other believes to hold.
            timing=Timing(sweep=0.02, lease=lease, retry_base=0.01),
        )
        for each, lease in zip(stores, (0.001, 10.0), strict=True)
    ]
    most = 0
    watching = threading.Event()

    def watch() -> None:
        nonlocal most
        while not watching.wait(0.01):
            held = sum(count for state, count in store.jobs.counts().items() if state.holds_place)
            most = max(most, held)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        for service in services:
            service.start()
        jobs = [submit() for _ in range(3)]
        for job in jobs:
            wait_for_state(store, job, JobState.SUCCEEDED)
        assert all(service.alive for service in services)
    finally:
        for service, each in zip(services, stores, strict=True):
            service.stop()
            each.close()
        watching.set()
        watcher.join()
    assert most <= 2
    for job in jobs:
        assert starts(JobFolder(tmp_path / "jobs" / job.id).path) == ["1", "2"]
        assert moves(store, job).count("STARTING") == 2
        assert worker_events(store, job) == [(a, s) for a in (1, 2) for s in range(1, 6)]
