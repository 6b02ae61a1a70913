"""Processes that play the ranks of a layout, for tests.

`Ranks.run(layout, function, *args)` calls `function(rank, *args)` in one process per rank, after
they have joined as that layout, and gives back what each returned. The function must be a module's
own (it travels by name), and imports Megatron inside itself. The processes are kept for several
runs and are forked from one that has imported Megatron, so a run costs a fraction of a second.
"""

import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from service.spec.layout import Layout
from tests.ports import free_port

TIMEOUT_SECONDS = 240
RUNS = 20
"""A process plays so many parts. Each may leave a group of gloo's behind, whose threads spin."""


class Ranks:
    """A pool of processes; see the module's text."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.megatron_backend.preload"])
        self._processes: list[tuple[ForkServerProcess, Connection]] = []
        self._runs = 0

    def run(self, layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(rank, *args)` on every rank of `layout`; results in rank order.

        Raises:
            RuntimeError: a rank failed; the message holds its traceback.
        """
        if self._runs == RUNS:
            self.close()
        self._runs += 1
        self._start(layout.world_size)
        port = free_port()
        members = self._processes[: layout.world_size]
        for rank, (_, connection) in enumerate(members):
            connection.send_bytes(_dump((layout, rank, port, function, args)))
        waiting = {connection: rank for rank, (_, connection) in enumerate(members)}
        results: list[Any] = [None] * layout.world_size
        ends = time.monotonic() + TIMEOUT_SECONDS
        while waiting:
            answered = wait(list(waiting), timeout=ends - time.monotonic())
            error = None if answered else "no answer"
            rank = next(iter(waiting.values()))
            for connection in answered:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    error, results[rank] = _load(connection.recv_bytes())
                except EOFError:
                    members[rank][0].join()
                    error = f"process ended with code {members[rank][0].exitcode}"
                if error is not None:
                    break
            if error is not None:
                self.close()  # the other ranks may wait for this one for ever
                raise RuntimeError(f"rank {rank} of {layout} failed:\n{error}")
        return results

    def close(self) -> None:
        """Ends the processes; the next run starts new ones."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
            process.join()
        self._processes, self._runs = [], 0

    def _start(self, count: int) -> None:
        while len(self._processes) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))


def _serve(connection: Connection) -> None:
    from megatron_backend.runtime import distributed

    while True:
        try:
            layout, rank, port, function, args = _load(connection.recv_bytes())
        except EOFError:
            return
        answer: tuple[str | None, Any]
        try:
            distributed.initialize(layout, rank, address="127.0.0.1", port=port, seed=1)
            answer = (None, function(rank, *args))
            del args
            distributed.shutdown()
        except Exception:
            answer = (traceback.format_exc(), None)
        connection.send_bytes(_dump(answer))


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
