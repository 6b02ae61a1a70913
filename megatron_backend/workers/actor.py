"""What runs inside a Ray actor: one rank, and a watch over it in threads of its own.

A rank's work is in its worker (`RankWorker`, `FrozenRank`); here is only what has to do with
processes.
"""

import logging
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ray
import torch
from torch import Tensor

from megatron_backend import tracing
from megatron_backend.runtime import distributed
from megatron_backend.signals import ignore_signals
from megatron_backend.workers.connections import Connection, connections, hang_up
from megatron_backend.workers.heartbeat import Beat, Heartbeat
from megatron_backend.workers.machine import Neighbourhood, Place, RankNetwork, threads
from megatron_backend.workers.ray_session import here
from service.spec import JobContext
from service.spec.layout import Layout
from service.spec.spans import JobTrace

WATCH = {"watch": 1}
"""Concurrency group of the calls that are answered while another one is under way."""


class Worker(Protocol):
    """What a rank does: plain Python, called from outside by the names of its methods."""

    def __init__(self, rank: int, layout: Layout) -> None:
        """Rank `rank` of `layout`; cheap, and without Megatron."""

    def setup(self, context: JobContext, address: str, port: int) -> None:
        """Joins the other ranks through rank 0 and gets the model ready."""

    def shutdown(self) -> None:
        """Leaves the others and lets go of the model; `setup` may follow."""


class RankActor:
    """One rank's process. `WorkerGroup` calls all of them at once.

    Args:
        worker: the class of what it does.
        rank: its number.
        layout: of all ranks.
        group: name of the group in the log; empty for the ranks of training.
    """

    def __init__(self, worker: type[Worker], rank: int, layout: Layout, group: str = "") -> None:
        name = f"{group} rank {rank}".lstrip()
        logging.basicConfig(
            level=logging.INFO, format=f"%(levelname)s {name} %(name)s: %(message)s"
        )
        # What Megatron-Core tells about itself at every start, in many lines, helps nobody here.
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
        ignore_signals()
        self._worker = worker(rank, layout)
        self._rank, self._layout, self._group = rank, layout, group
        self._heartbeat = Heartbeat()
        self._network = RankNetwork()

    def prepare(self, around: Neighbourhood | None) -> Place:
        """Imports Megatron, which takes seconds, so that ranks do it side by side.

        Args:
            around: the rank's machine and the others; None where the driver has seen to both.
        """
        distributed.prepare()
        if around is not None:
            torch.set_num_threads(threads(around))
            self._network.face(around.peers)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        return Place(
            address=ray.util.get_node_ip_address(),
            port=port,
            node=here(),
            pid=os.getpid(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        )

    def call(
        self,
        method: str,
        packed: tuple[Sequence[Any], Mapping[str, Any]],
        trace: JobTrace | None = None,
    ) -> tuple[Any, float]:
        """Calls a method of the worker with (args, kwargs), as a part of `trace`.

        Returns:
            What it answered, tensors as numpy arrays, and `Call.own_seconds`.
        """
        args, kwargs = packed
        with tracing.rank_span(trace, method, self._layout, self._rank, self._group):
            with self._heartbeat.watching(method) as call:
                result = getattr(self._worker, method)(*args, **kwargs)
            tracing.note_own_seconds(call.own_seconds)
        # Megatron-Core patches how torch pickles tensors, so one that is sent from here could only
        # be read where Megatron is imported, which the driver must not have to do.
        return result.numpy() if isinstance(result, Tensor) else result, call.own_seconds

    @ray.method(concurrency_group="watch")
    def beat(self) -> Beat:
        """What this rank is doing."""
        return self._heartbeat.beat()

    @ray.method(concurrency_group="watch")
    def flush_spans(self) -> None:
        """Sends the spans that are not sent yet; see `tracing.flush`."""
        tracing.flush()

    @ray.method(concurrency_group="watch")
    def connections(self) -> list[Connection]:
        """This process's connections to other processes."""
        return connections()

    @ray.method(concurrency_group="watch")
    def hang_up(self, chosen: Sequence[Connection]) -> None:
        """Ends some of them, which fails the collectives that wait on them."""
        hang_up(chosen)
