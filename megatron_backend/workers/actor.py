"""What runs inside a Ray actor: a rank, with its checkpoints."""

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_backend.layout import Layout
from megatron_backend.workers.rank import RankWorker
from service.spec import JobContext


class RankActor:
    """One rank's process. Its methods are called by name, on all ranks at once (`WorkerGroup`)."""

    def __init__(self, rank: int, layout: Layout) -> None:
        logging.basicConfig(
            level=logging.INFO, format=f"%(levelname)s rank {rank} %(name)s: %(message)s"
        )
        self._worker = RankWorker(rank, layout)

    def place(self) -> tuple[str, int, int]:
        """Address of this machine, a port that is free on it, and the process id."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        return address, port, os.getpid()

    def setup(self, context: JobContext, address: str, port: int) -> None:
        """See `RankWorker.setup`."""
        self._worker.setup(context, address, port)

    def call(self, method: str, packed: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
        """Calls a method of this class, or one of the rank's."""
        args, kwargs = packed
        owner = self if hasattr(self, method) else self._worker
        return getattr(owner, method)(*args, **kwargs)

    def save_state(self, staged: str) -> None:
        """See `checkpoint.torch_dist.save_state`."""
        from megatron_backend.checkpoint.torch_dist import save_state

        save_state(Path(staged), self._worker.model, self._worker.trainer.optimizer)

    def load_state(self, checkpoint: str, same_layout: bool) -> None:
        """See `checkpoint.torch_dist.load_state`."""
        from megatron_backend.checkpoint.torch_dist import load_state

        load_state(
            Path(checkpoint),
            self._worker.model,
            self._worker.trainer.optimizer,
            same_layout=same_layout,
        )
