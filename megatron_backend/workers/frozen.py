"""What one rank of a model does that is not trained: a teacher, or a reward model.

Such a model has ranks of its own, with a layout of its own, and no optimizer. Its weights come from
the same place at every start, so none of it is in a checkpoint.

This module imports Megatron only inside `setup` and later, so that the driver can import it.
"""

import gc
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from algorithms.batch import Batch
from megatron_backend.precision import torch_dtype
from megatron_backend.runtime import distributed
from megatron_backend.training.shares import RowShare
from service.spec import JobContext
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.other_models import Role

if TYPE_CHECKING:
    from megatron_backend.training.reading import Reader


class FrozenRank:
    """One rank of a model that only reads.

    Args:
        rank: its number.
        layout: of all ranks of this model.

    Attributes:
        role: what the job uses the model for.
        head: what the model says of a token.
    """

    role: ClassVar[Role]
    head: ClassVar[Head]

    def __init__(self, rank: int, layout: Layout) -> None:
        self.rank, self.layout = rank, layout
        self._reader: Reader | None = None

    def setup(self, context: JobContext, address: str, port: int) -> None:
        """Joins the other ranks of this model, builds it and loads its weights.

        Args:
            context: the job.
            address: host name of rank 0.
            port: a free port on it.

        Raises:
            ValueError: the model's config or the layout is not supported.
            FileNotFoundError, KeyError: weights are missing.
        """
        spec, resolved = context.spec, context.other_models[self.role]
        config = ModelConfig.from_hf(resolved.config)
        config.check_layout(tp=self.layout.tp, pp=self.layout.pp)
        self.layout.stage_layers(config.num_layers)
        distributed.initialize(
            self.layout, self.rank, address=address, port=port, seed=spec.training.seed
        )
        from megatron_backend.models.build import build_model
        from megatron_backend.training.reading import Reader
        from megatron_backend.workers.weights import load_resolved

        model = build_model(
            config,
            self.layout,
            dtype=torch_dtype(spec.precision.dtype),
            max_length=spec.training.max_length,
            head=self.head,
        )
        load_resolved(model, config, resolved, seed=spec.training.seed)
        self._reader = Reader(
            model,
            config,
            self.layout,
            vocab_size=min(config.vocab_size, int(context.model.config["vocab_size"])),
            temperature=spec.rollout.temperature,
            micro_batch_size=spec.training.fixed_micro_batch_size,
            micro_batch_tokens=spec.training.micro_batch_tokens,
            packing=spec.training.packing,
        )

    def shutdown(self) -> None:
        """Lets go of the model and leaves the process groups; `setup` may follow."""
        self._reader = None
        gc.collect()
        distributed.shutdown()

    @property
    def reader(self) -> "Reader":
        """This rank's part of the model."""
        if self._reader is None:
            raise RuntimeError(f"rank {self.rank} has no model yet: call setup first")
        return self._reader


class TeacherRank(FrozenRank):
    """A rank of a teacher."""

    role = "teacher"
    head = "vocabulary"

    def likeliest(self, batch: Batch, count: int) -> list[RowShare] | None:
        """This rank's rows of `algorithms.protocols.Teacher.likeliest`: ids, then log-probs."""
        reader = self.reader
        from megatron_backend.training.forward import read_likeliest

        return reader.read(batch, partial(read_likeliest, count))


class ScorerRank(FrozenRank):
    """A rank of a reward model."""

    role = "reward"
    head = "value"

    def scores(self, batch: Batch) -> list[RowShare] | None:
        """This rank's rows of `algorithms.protocols.Scorer.scores`, alone in a list."""
        reader = self.reader
        from megatron_backend.training.values import read_scores

        return reader.read(batch, read_scores)
