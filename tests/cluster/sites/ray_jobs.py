"""A Ray of two nodes on this machine: a head without room for drivers, and one that has it.

The second node is what `lose_node` kills. Each process of a node carries a mark in its environment,
by which all of them are found. Ray listens on every interface, so a token guards it.
"""

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from service.launchers.ray_jobs.config import RayJobsCluster
from tests.cluster.sites.site import DRIVER, Ability, Patience, Site
from tests.cluster.sites.tcp_gate import Gate
from tests.ports import free_port
from tests.waiting import wait_until

NEEDED = ("aiohttp_cors", "grpc", "opencensus")
MARK = "PLANISH_TEST_RAY_NODE"
SLOTS = 4
"""How many drivers run at once."""
STATUS_SECONDS = 180
START_TRIES = 3
"""Ray gives the agent of a node 15 seconds to come up and the node 30, on a busy machine too."""


class _Node:
    """One node: the processes that carry its mark."""

    def __init__(self, folder: Path, options: list[str], token: str) -> None:
        self.mark = secrets.token_hex(8)
        environment = {
            **os.environ,
            MARK: self.mark,
            "SPT_NOENV": "1",  # else titles are written over the mark
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
        }
        environment.pop("RAY_ADDRESS", None)
        command = [str(Path(sys.executable).with_name("ray")), "start", "--num-gpus=0"]
        for _ in range(START_TRIES):
            done = subprocess.run(
                [*command, "--object-store-memory=80000000", "--disable-usage-stats", *options],
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                start_new_session=True,
                preexec_fn=_go_first,
            )
            if done.returncode == 0:
                return
            self.kill()
        pytest.fail(f"Ray did not start: {done.stdout}{done.stderr}", pytrace=False)

    def kill(self) -> None:
        """At once, as when a machine loses power. What is started meanwhile is found again."""
        while found := list(self._processes()):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _processes(self) -> Iterator[int]:
        mark = f"{MARK}={self.mark}".encode()
        for entry in os.listdir("/proc"):
            with suppress(OSError):
                if entry.isdecimal() and mark in Path(f"/proc/{entry}/environ").read_bytes():
                    yield int(entry)


class RayJobsSite(Site):
    """Ray, reached through a gate."""

    kind = "ray_jobs"
    patience = Patience(start=90, end=60, again=120)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resources = {"cluster": "ray"}
        self.cannot = {
            Ability.PREEMPT: "Ray takes machines from nobody",
            Ability.LIMIT_MEMORY: "Ray's memory monitor ends its workers, never a job's driver",
        }
        self._token = secrets.token_hex(32)
        port, dashboard = free_port(), free_port()
        self._head = _Node(
            folder,
            [
                *("--head", f"--port={port}", "--num-cpus=0", f"--temp-dir={folder}/r"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            ],
            self._token,
        )
        self._address = f"127.0.0.1:{port}"
        self._gate = Gate("127.0.0.1", dashboard)
        (folder / "token").write_text(self._token)
        self.cluster = RayJobsCluster(
            type="ray_jobs",
            address=f"http://127.0.0.1:{self._gate.port}",
            token_file=folder / "token",
            python=str(DRIVER),
            driver_resources={"slot": 1},
            poll_seconds=0.3,
        )
        try:
            self._worker = self._new_worker()
        except BaseException:
            self._head.kill()
            raise

    def down(self) -> None:
        """Ends all of it."""
        self._gate.close()
        self._worker.kill()
        self._head.kill()

    @contextmanager
    def fill(self) -> Iterator[None]:
        """Somebody else's job takes every slot."""
        name = f"other-{secrets.token_hex(8)}"
        body = {
            "submission_id": name,
            "entrypoint": "sleep 600",
            "entrypoint_resources": {"slot": SLOTS},
        }
        with httpx.Client(
            base_url=f"{self.cluster.model_dump()['address']}/api/jobs/",
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=60,
            trust_env=False,
        ) as ray:
            ray.post("", json=body).raise_for_status()
            _wait_for_status(ray, name, "RUNNING")
            try:
                yield
            finally:
                ray.post(f"{name}/stop").raise_for_status()
                _wait_for_status(ray, name, "STOPPED")

    def preempt(self, launcher_id: str) -> None:
        raise NotImplementedError(self.cannot[Ability.PREEMPT])

    def lose_node(self, launcher_id: str) -> None:
        """All drivers are on the second node; another one takes its place."""
        assert launcher_id
        self._worker.kill()
        self._worker = self._new_worker()

    def away(self) -> AbstractContextManager[None]:
        return self._gate.closed()

    def _new_worker(self) -> _Node:
        resources = f'--resources={{"slot": {SLOTS}}}'
        return _Node(
            self.folder, [f"--address={self._address}", "--num-cpus=1", resources], self._token
        )


def open_site(folder: Path) -> Iterator[Site]:
    for module in NEEDED:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"this Python has no {module}, of ray[default]: its Ray has no Jobs API")
    site = RayJobsSite(folder)
    try:
        yield site
    finally:
        site.down()


def _go_first() -> None:
    """For the same limits: a Ray that starts goes before other tests, where that is allowed."""
    with suppress(OSError):  # sessions share the machine first, then the processes of each
        Path("/proc/self/autogroup").write_text("-10")
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


def _wait_for_status(ray: httpx.Client, name: str, status: str) -> None:
    def told() -> Mapping[str, object]:
        found: Mapping[str, object] = ray.get(name).raise_for_status().json()
        return found

    wait_until(
        lambda: told()["status"] == status,
        f"{name} is {status}",
        STATUS_SECONDS,
        details=told,
        pause=0.2,
    )
