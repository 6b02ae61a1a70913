"""What runs inside a Ray actor: a rank of training and generation, with its checkpoints."""

import logging
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from algorithms.protocols import Completion, Sampling
from megatron_backend.runtime import distributed
from megatron_backend.workers.rank import RankWorker
from service.spec.layout import Layout

if TYPE_CHECKING:
    from megatron_backend.generation.rank import GenerationRank


class RankActor:
    """One rank's process. Its methods are called by name, on all ranks at once (`WorkerGroup`)."""

    def __init__(self, rank: int, layout: Layout) -> None:
        logging.basicConfig(
            level=logging.INFO, format=f"%(levelname)s rank {rank} %(name)s: %(message)s"
        )
        # What Megatron-Core tells about itself at every start, in many lines, helps nobody here.
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
        self._worker = RankWorker(rank, layout)
        self._generation: GenerationRank | None = None

    def call(self, method: str, packed: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
        """Calls a method of this class or of `RankWorker` with (args, kwargs).

        Tensors are answered as numpy arrays.
        """
        args, kwargs = packed
        owner = self if hasattr(self, method) else self._worker
        result = getattr(owner, method)(*args, **kwargs)
        # Megatron-Core patches how torch pickles tensors, so one that is sent from here could only
        # be read where Megatron is imported, which the driver must not have to do.
        return result.numpy() if isinstance(result, Tensor) else result

    def prepare(self) -> tuple[str, int, int]:
        """Imports Megatron, which takes seconds, so that ranks do it side by side.

        Returns:
            Address of this machine, a port that is free on it, and the process id.
        """
        import ray

        distributed.prepare()
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        return address, port, os.getpid()

    def setup_generation(
        self, layout: Layout, stop_token_ids: Sequence[int], max_length: int
    ) -> None:
        """Makes the generation copy, after `setup`; see `GenerationRank`."""
        from megatron_backend.generation.rank import GenerationRank

        self._generation = GenerationRank(
            self._worker.config,
            layout,
            padded_vocab=self._worker.model[0].vocab_size,
            stop_token_ids=stop_token_ids,
            max_length=max_length,
            dtype=self._worker.dtype,
        )

    def sync_weights(self, version: int) -> None:
        """See `GenerationRank.sync`."""
        self._generation_rank.sync(self._worker.model[0], version)

    def generate(
        self, prompts: Sequence[Sequence[int]], indices: Sequence[int], sampling: Sampling
    ) -> list[Completion] | None:
        """See `GenerationRank.generate`; None on ranks that another one speaks for."""
        generation = self._generation_rank
        completions = generation.generate(prompts, indices, sampling)
        return completions if self._worker.rank in generation.layout.output_ranks else None

    def save_state(self, staged: str) -> None:
        """See `checkpoint.torch_dist.save_state`."""
        from megatron_backend.checkpoint.torch_dist import save_state

        save_state(Path(staged), self._worker.model[0], self._worker.trainer.optimizer)

    def load_state(self, checkpoint: str, same_layout: bool) -> None:
        """See `checkpoint.torch_dist.load_state`."""
        from megatron_backend.checkpoint.torch_dist import load_state

        load_state(
            Path(checkpoint),
            self._worker.model[0],
            self._worker.trainer.optimizer,
            same_layout=same_layout,
        )

    def logits(self, tokens: Tensor) -> Tensor | None:
        """[B, T, V] on the first rank that has them, None on the others."""
        from megatron_backend.workers.logits import whole_logits

        logits = whole_logits(
            self._worker.trainer.chunks,
            tokens.to(device=distributed.device()),
            vocab_size=self._worker.config.vocab_size,
        )
        speaks = self._worker.rank == self._worker.layout.output_ranks[0]
        return logits.cpu() if logits is not None and speaks else None

    @property
    def _generation_rank(self) -> "GenerationRank":
        if self._generation is None:
            raise RuntimeError("this job has no generation copy: call setup_generation first")
        return self._generation
