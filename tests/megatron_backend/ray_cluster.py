"""A Ray of several nodes on this machine, as a cluster's launcher would have started it.

    with RayCluster(cpus=[4, 2]) as cluster: ...

Each node is a real raylet with its own agents and workers; they share the machine, and so its
address. It runs in a process of its own, which takes all of it along when it ends; the driver's
process is on a node without CPUs, as the head of a cluster often is.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import psutil

from megatron_backend.workers.ray_session import START_ENVIRONMENT

TRIES = 4
OBJECT_STORE_BYTES = 100_000_000


class RayCluster:
    """See the module's text; a context manager.

    Attributes:
        environment: what a driver needs to find it.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        self._token = secrets.token_hex(16)
        self._cpus = cpus
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **START_ENVIRONMENT,
        }
        environment.pop("OMP_NUM_THREADS", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.megatron_backend.ray_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        try:
            self.environment = {
                "RAY_ADDRESS": self._ask("start"),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self._token,
            }
            self.raylets = [self.add(cpus) for cpus in self._cpus]
        except BaseException:
            self._process.communicate()
            raise
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()  # it sees the end of its input, and ends

    def add(self, cpus: int) -> int:
        """Another node; the process id of its raylet."""
        raylet = self._ask("add", cpus)
        assert isinstance(raylet, int)
        return raylet

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _add(cluster: Any, cpus: int) -> Any:
    """A node, tried again where its processes were too slow to find each other."""
    left = TRIES
    while True:
        before = set(psutil.Process().children(recursive=True))
        try:
            return cluster.add_node(
                num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False
            )
        except Exception:  # a bare one where it was too slow
            for process in set(psutil.Process().children(recursive=True)) - before:
                process.kill()
            left -= 1
            if not left:
                raise


def main() -> None:
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer
    cluster = Cluster()
    try:
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            cpus = arguments[0] if command == "add" else 0
            node = _add(cluster, cpus)
            raylet = node.all_processes["raylet"][0].process.pid
            print(json.dumps(raylet if command == "add" else cluster.address), file=answers)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
