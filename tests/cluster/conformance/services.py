"""The service itself on a site: its API, reconciler and store, in threads of the test process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import uvicorn
from sqlalchemy import update

from service.api.context import ServiceContext
from service.app import create_app
from service.client import Client
from service.jobs import Attempt, Job, new_job_id
from service.launchers import Launcher
from service.settings import Settings
from service.store import Store, tables
from tests.cluster.conformance.trial import Trial, wait_until
from tests.cluster.sites.site import Site
from tests.service.store.sample_jobs import context, document

KEY = "planish_" + "k" * 32


class Service:
    """A service whose only cluster is the site."""

    def __init__(
        self, site: Site, trial: Trial, launcher: Launcher, server: uvicorn.Server
    ) -> None:
        self.site, self.trial, self.launcher = site, trial, launcher
        app: Any = server.config.app
        self._context: ServiceContext = app.state.service
        self.store: Store = self._context.store

    @classmethod
    @contextmanager
    def running(cls, site: Site, trial: Trial) -> Iterator[Self]:
        """Inside the block it answers; its jobs are in the folder of `trial`."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        settings = Settings.model_validate(
            {
                "data_dir": trial.jobs_dir.parent,
                "port": listener.getsockname()[1],
                "bootstrap_key": KEY,
                "reconcile_seconds": 0.1,
                "stream_poll_seconds": 0.05,
            }
        )
        assert settings.jobs_dir == trial.jobs_dir
        launcher = site.launcher(trial.jobs_dir)
        app = create_app(settings, launchers={_cluster(site): launcher})
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive(), "the service is up", 120)
            yield cls(site, trial, launcher, server)
        finally:
            server.should_exit = True
            thread.join()
            listener.close()

    def submit(
        self, *behaviours: str, retry: dict[str, int] | None = None, **resources: Any
    ) -> Job:
        """Stores a job, as the API does with one that it accepted."""
        spec = document(resources={**self.site.resources, **resources}, retry=retry or {})
        resolved = context(spec, new_job_id())
        self.trial.behave(resolved.job_id, *behaviours)
        self.trial.attempts += [(resolved.job_id, attempt) for attempt in (1, 2)]
        return self.store.jobs.create(resolved, spec)[0]

    def newest(self, job: Job) -> Attempt:
        """The job's newest attempt."""
        return self.store.attempts.of_job(job.id)[-1]

    def wait_started(self, job: Job) -> None:
        """Until the driver of its first attempt works, and the service says so."""

        def running() -> bool:
            found = self.store.jobs.get(job.id)
            assert not found.state.terminal, f"{found.reason}: {found.message}"
            return found.state == "RUNNING" and self.trial.working(job.id)

        wait_until(running, f"{job.id} runs", self.site.patience.start)

    def wait_ended(self, job: Job) -> Job:
        """The job, once it has ended."""
        patience = self.site.patience
        wait_until(
            lambda: self.store.jobs.get(job.id).state.terminal,
            f"{job.id} has ended; its attempts: {self.store.attempts.of_job(job.id)}",
            2 * (patience.start + patience.end) + patience.again,
        )
        return self.store.jobs.get(job.id)

    def let_time_pass(self, job: Job, *, minutes: int) -> None:
        """The job's attempts were started so much earlier."""
        with self.store.database.writing() as connection:
            connection.execute(
                update(tables.attempts)
                .where(tables.attempts.c.job_id == job.id)
                .values(started_at=time.time() - 60 * minutes)
            )

    def moves(self, job: Job) -> list[str]:
        """The states that the job went through."""
        log = self.store.events.after(job.id, 0, limit=10_000)
        return [event.data["to"] for event in log if event.kind == "state"]

    def worker_events(self, job: Job) -> list[tuple[int | None, int | None]]:
        """(attempt, seq) of each event of its drivers, in the log's order."""
        log = self.store.events.after(job.id, 0, limit=10_000)
        return [(event.attempt, event.seq) for event in log if event.seq is not None]

    @contextmanager
    def following_log(self, job: Job) -> Iterator["LogFollower"]:
        """Somebody who has followed the job's log since before the block."""
        with Client(self._context.settings.base_url, KEY) as client:
            follower = LogFollower(client, job.id)
            follower.start()
            try:
                yield follower
            finally:
                follower.join(timeout=60)


class LogFollower(threading.Thread):
    """Reads a job's log as a stream until the service ends it, which is when the job has ended."""

    def __init__(self, client: Client, job_id: str) -> None:
        super().__init__(name="log follower", daemon=True)
        self._client, self._job_id = client, job_id
        self.pieces: list[tuple[int, str]] = []
        """(attempt, text), as they came."""

    def run(self) -> None:
        for chunk in self._client.follow_log(self._job_id):
            self.pieces.append((chunk.attempt, chunk.text))

    def text_of(self, attempt: int) -> str:
        """What came of one attempt's log."""
        return "".join(text for number, text in self.pieces if number == attempt)


def _cluster(site: Site) -> str:
    return str(site.resources.get("cluster", "local"))
