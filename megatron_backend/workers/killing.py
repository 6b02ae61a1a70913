"""kill -9 of a rank's process, on whichever machine it is.

A process id means nothing on another machine, nor in another pod of the same one, and Ray's id of
a node says which is which. So a process elsewhere is killed by a task that runs beside it.
"""

import os
import signal
from contextlib import suppress

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def kill_process(pid: int) -> None:
    """Kills a process of this machine, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_on_node(node: str, pid: int) -> ray.ObjectRef:
    """Kills a process of one of Ray's nodes; the answer comes when it is done, or never."""
    return (
        ray.remote(kill_process)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(pid)
    )
