"""A real service on a loopback port, in a thread of the test process."""

import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from service.api.context import ServiceContext
from service.app import create_app
from service.catalogue import Catalogue
from service.jobs import JobState, new_job_id
from service.launchers.local import LocalLauncher
from service.settings import Settings
from service.store import Store
from tests.service.store.sample_jobs import context, document
from tests.waiting import wait_until

KEY = "planish_" + "k" * 32
DRIVER = Path(__file__).parent / "launchers" / "driver.py"
# Generous: tests share their machine.
TIMEOUT_SECONDS = 300.0
ROW = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service that answers."""

    settings: Settings
    server: uvicorn.Server
    thread: threading.Thread
    http: httpx.Client
    """With the bootstrap key."""
    anonymous: httpx.Client
    """Without one."""

    @property
    def url(self) -> str:
        return self.settings.base_url

    @property
    def context(self) -> ServiceContext:
        app: Any = self.server.config.app
        found = app.state.service
        assert isinstance(found, ServiceContext)
        return found

    @property
    def store(self) -> Store:
        return self.context.store

    def stop(self) -> None:
        self.context.stopping.set()
        self.server.should_exit = True
        self.thread.join(timeout=TIMEOUT_SECONDS)
        assert not self.thread.is_alive()
        self.http.close()
        self.anonymous.close()

    def upload(self, content: bytes = ROW, **fields: str) -> str:
        """Uploads rows to train on and returns the file's id."""
        answer = self.http.post("/v1/files", data=fields, files={"file": ("rows.jsonl", content)})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job_document(self, **parts: Any) -> dict[str, Any]:
        """A document that this service accepts; `parts` replace its top-level fields."""
        return {
            "name": "sample",
            "model": {"path": "tiny"},
            "algorithm": {"type": "sft"},
            "data": {"train": self.upload()},
            "training": {"max_length": 128, "global_batch_size": 8},
            **parts,
        }

    def submit(self, **parts: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/jobs", json=self.job_document(**parts))
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def store_job(self, name: str = "sample") -> str:
        """Puts a job into the store, past validation."""
        spec = document(name)
        job, _ = self.store.jobs.create(context(spec, new_job_id()), spec)
        return job.id

    def wait_for(self, job_id: str, *states: JobState, seconds: float = TIMEOUT_SECONDS) -> None:
        wait_until(
            lambda: self.store.jobs.get(job_id).state in states,
            f"{job_id} becomes {states}",
            seconds,
        )


def start_service(
    data_dir: Path,
    *,
    model_root: Path,
    catalogue: Catalogue,
    behaviours: Sequence[str] = (),
    capacity: int = 0,
    gpus: int | None = None,
    capability: tuple[int, int] | None = None,
    **settings: Any,
) -> RunningService:
    """Starts a service.

    Args:
        data_dir: for its data.
        model_root: folder with models.
        catalogue: of environments.
        behaviours: what the test driver does in each attempt.
        capacity: jobs at once; with 0 they stay in the queue.
        gpus: of this machine; null counts them.
        capability: their CUDA compute capability.
        settings: others.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", settings.pop("port", 0)))
    known = Settings.model_validate(
        {
            "data_dir": data_dir,
            "port": listener.getsockname()[1],
            "bootstrap_key": KEY,
            "model_roots": (model_root,),
            "reconcile_seconds": 0.1,
            "stream_poll_seconds": 0.05,
            **settings,
        }
    )
    command = (sys.executable, "-I", "-S", str(DRIVER), *behaviours)
    launcher = LocalLauncher(
        known.jobs_dir, capacity=capacity, gpus=gpus, capability=capability, command=command
    )
    app = create_app(known, launchers={"local": launcher}, catalogue=catalogue)
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()

    def started() -> bool:
        assert thread.is_alive(), "the service did not start"
        return server.started

    wait_until(started, "the service has started", TIMEOUT_SECONDS, pause=0.01)
    anonymous = httpx.Client(base_url=known.base_url, timeout=TIMEOUT_SECONDS)
    http = httpx.Client(
        base_url=known.base_url,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=TIMEOUT_SECONDS,
    )
    return RunningService(known, server, thread, http, anonymous)
