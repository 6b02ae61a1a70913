"""What became of a rank, as far as it can be told from what is left of it."""

from collections.abc import Callable
from pathlib import Path

import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from megatron_backend.workers.errors import (
    NodeLost,
    WorkerLost,
    WorkerOutOfMemory,
    WorkerPreempted,
)

_NODE_TEXTS = ("node has died", "node died", "node has crashed", "owner has died")
_NETWORK_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def death_of(
    rank: int,
    error: RayError,
    *,
    oom_killed: bool,
    machine_there: Callable[[], bool],
    group: str = "",
) -> WorkerLost:
    """What Ray's error means.

    Args:
        rank: the rank that does not answer any more.
        error: Ray's.
        oom_killed: the kernel has killed a process of that machine for its memory meanwhile.
        machine_there: whether that machine still answers. It is asked only where nothing else says
            why, for Ray often tells of a rank's end before it sees that the machine is gone.
        group: see `RanksFailed`.
    """
    # Ray's indented lines name the actor by numbers that nobody else knows.
    lines = [line.strip() for line in str(error).splitlines() if line[:1] != "\t"]
    text = " ".join(line for line in lines if line)
    if isinstance(error, OutOfMemoryError) or "memory on the node" in text:
        return WorkerOutOfMemory(rank, text, group=group)
    if isinstance(error, RayActorError) and error.preempted:
        return WorkerPreempted(rank, text, group=group)
    if any(words in text for words in _NODE_TEXTS):
        return NodeLost(rank, text, group=group)
    if oom_killed:
        killed = f"the kernel killed a process to free memory. {text}"
        return WorkerOutOfMemory(rank, killed, group=group)
    if not machine_there():
        return NodeLost(rank, f"its machine does not answer. {text}", group=group)
    return WorkerLost(rank, text, group=group)


def is_network_error(error: BaseException) -> bool:
    """Whether a collective failed because another rank could not be reached."""
    return isinstance(
        error, torch.distributed.DistNetworkError | torch.distributed.DistBackendError
    ) or (isinstance(error, RuntimeError) and any(text in str(error) for text in _NETWORK_TEXTS))


def oom_kills() -> int:
    """How many processes the kernel of this machine has killed to free memory.

    Counted for the cgroup that this process is in, where there is one, for a container's limit is
    no business of its neighbours; else for the machine.
    """
    for path, name in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, count = line.partition(" ")
            if key == name:
                return int(count)
    return 0
