"""A Ray cluster for one driver: the one that it was started in, or one of its own.

In a cluster (KubeRay, SLURM) RAY_ADDRESS names the Ray that is already there, and RAY_AUTH_TOKEN
is what it asks for; its processes, and so the ranks, have the environment of whoever started it.
Elsewhere the driver starts a small one on this machine, for itself alone: a random token guards it,
the ranks talk over the loopback interface, and its processes end with the driver, even one that is
killed. (The kernel kills Ray's own processes when the driver dies; ranks end when the raylet does.
Ray's two agents notice it within ten seconds, and then look for the dead control service for
`RECONNECT_SECONDS`.)

The processes of such a Ray are taken out of the driver's process group and do not see what ends the
driver (`megatron_backend.signals`): a Ray that ended as well would be gone before the driver has
saved and said how it ended, and Ray exits a process whose control service does not answer.
"""

import logging
import os
import secrets
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from megatron_backend.ray_settings import NO_BYTECODE, OBJECT_STORE_BYTES, QUIET, guarded
from megatron_backend.signals import block_signals
from megatron_backend.workers.errors import RayUnavailable

log = logging.getLogger(__name__)

START_TRIES = 3
START_ENVIRONMENT = {"RAY_raylet_start_wait_time_s": "120"}
"""A node may take so long to register; on a busy machine Ray's own 30 s are short. (A raylet also
gives up after 20 s without its agents, which no setting changes; hence the tries.)"""
RECONNECT_SECONDS = 20


def set_environment(ranks: int) -> None:
    """Settings that Ray's processes, and so the ranks, inherit. Call before `ray` is imported.

    Args:
        ranks: how many processes will run on this machine.
    """
    os.environ.pop(NO_BYTECODE, None)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if own_cluster():
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
        os.environ.update(
            guarded(secrets.token_hex(32))
            | START_ENVIRONMENT
            | {"RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_SECONDS)}
        )
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def threads_per_rank(ranks: int) -> int:
    """Cores of this machine for each rank, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@contextmanager
def ray_session(ranks: int, *, gpus: int) -> Iterator[None]:
    """Ray is there inside this block.

    Args:
        ranks: how many processes will run in it.
        gpus: of this machine, for the case that the driver starts its own Ray.

    Raises:
        RayUnavailable: Ray did not start, or could not be reached.
    """
    import ray

    options: dict[str, Any] = {"configure_logging": False}
    if own_cluster():
        _shield_processes()
        options |= {
            "address": "local",
            "num_cpus": ranks,
            "num_gpus": gpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    _start(options)
    try:
        yield
    finally:
        _end_at_once()
        ray.shutdown()


def _start(options: dict[str, Any]) -> None:
    """Starts Ray, again where its processes were too slow to find each other."""
    import ray

    others = set(_descendants(os.getpid()))
    for left in reversed(range(START_TRIES)):
        try:
            ray.init(**options)
            return
        except Exception as error:  # a bare Exception where it was too slow
            ray.shutdown()
            _kill(set(_descendants(os.getpid())) - others)  # else it stays beside the next one
            if not left:
                raise RayUnavailable(f"Ray did not start: {error}") from error
            log.warning("Ray did not start, and is tried again: %s", error)


def here() -> str:
    """Ray's id of the node that this process is on."""
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def dead_processes() -> list[str]:
    """Which of its own Ray's processes have died; of another's Ray nothing is known."""
    from ray._private.worker import _global_node

    if not own_cluster() or _global_node is None:
        return []
    return [str(name) for name, _ in _global_node.dead_processes()]


def own_cluster() -> bool:
    """Whether the driver starts a Ray for itself."""
    return "RAY_ADDRESS" not in os.environ


def _shield_processes() -> None:
    """Ray calls this function of its own in each child that it forks, before it executes it."""
    from ray._private import utils

    die_with_parent = utils.set_kill_on_parent_death_linux

    def in_child() -> None:
        die_with_parent()
        os.setpgid(0, 0)
        block_signals()

    utils.set_kill_on_parent_death_linux = in_child


def _end_at_once() -> None:
    """Has `ray.shutdown` kill what it would ask to end, and wait for a second each, since the
    signal that asks is blocked; and kill what the raylet would have ended, as its agents."""
    from ray._private.worker import _global_node as node

    if not own_cluster() or node is None:
        return
    raylets = node.all_processes.get("raylet", [])
    kill = node.kill_all_processes

    def kill_all(*, check_alive: bool, **_: object) -> None:
        left = [child for raylet in raylets for child in _descendants(raylet.process.pid)]
        kill(check_alive=check_alive, allow_graceful=False)
        _kill(left)

    node.kill_all_processes = kill_all


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
