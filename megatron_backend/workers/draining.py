"""Machines of a cluster that are about to be taken back.

Where Kubernetes ends a pod it sends SIGTERM to the pod's first process, `ray start`, and not to a
driver, which may be in another pod. Ray then marks its node as draining, and keeps it up for a
while (RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S). A driver that sees one of its own machines drain has
been told to end as much as by a signal, so it sends itself one.
"""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ray.exceptions import RayError

from megatron_backend.workers.ray_session import own_cluster

LOOK_SECONDS = 1.0


@contextmanager
def told_of_draining(nodes: Callable[[], Collection[str]]) -> Iterator[None]:
    """Sends this process one SIGTERM, should one of these machines drain inside the block.

    Args:
        nodes: Ray's ids of the machines; asked at every look.
    """
    if own_cluster():
        yield  # this machine alone, and its signals come by themselves
        return
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(nodes, over), name="draining", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch(nodes: Callable[[], Collection[str]], over: threading.Event) -> None:
    from ray._private.state import state

    while not over.wait(LOOK_SECONDS):
        try:
            draining = state.get_draining_nodes()
        except RayError:
            continue  # Ray's control service does not answer just now
        if not draining.keys().isdisjoint(nodes()):
            os.kill(os.getpid(), signal.SIGTERM)
            return
