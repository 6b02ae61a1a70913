"""What one rank does. Plain Python: `workers.group` puts one into each Ray actor.

Every rank is called with the same arguments. It takes its own rows of a batch by itself and answers
for them only: `training.shares.merge_step` and `gather_rows` below make one answer of all ranks'.

This module imports Megatron only inside `setup`, so that the driver can import it for its types.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer
from megatron_backend.models.config import ModelConfig
from megatron_backend.models.tensors import RandomTensors, SafetensorsFolder, TensorSource
from megatron_backend.runtime import distributed
from megatron_backend.training.shares import StepShare
from service.spec import JobContext
from service.spec.layout import Layout

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_backend.training.step import Trainer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RankWorker:
    """One rank of a job's training layout.

    Args:
        rank: its number.
        layout: of all ranks.
    """

    def __init__(self, rank: int, layout: Layout) -> None:
        self.rank = rank
        self.layout = layout
        self.coordinates = layout.coordinates(rank)
        self.context: JobContext | None = None
        self._trainer: Trainer | None = None
        self._config: ModelConfig | None = None

    @property
    def trainer(self) -> "Trainer":
        """The trained model and its optimizer (`trainer.chunks[i].module` is `model[i]`)."""
        if self._trainer is None:
            raise RuntimeError(f"rank {self.rank} has no model yet: call setup first")
        return self._trainer

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        if self._config is None:
            raise RuntimeError(f"rank {self.rank} has no model yet: call setup first")
        return self._config

    @property
    def model(self) -> "list[GPTModel]":
        """This rank's part of the trained model: its chunks, see `models.build`."""
        return [chunk.module for chunk in self.trainer.chunks]

    @property
    def dtype(self) -> torch.dtype:
        """Format of parameters and activations."""
        if self.context is None:
            raise RuntimeError(f"rank {self.rank} has no job yet: call setup first")
        return _DTYPES[self.context.spec.precision.dtype]

    def setup(self, context: JobContext, address: str, port: int) -> None:
        """Joins the other ranks, builds the model, loads the job's starting weights.

        Args:
            context: the job.
            address: host name of rank 0.
            port: a free port on it.

        Raises:
            ValueError: the model's config or the layout is not supported.
            FileNotFoundError, KeyError: weights are missing.
        """
        self._config = ModelConfig.from_hf(context.model.config)
        self._config.check_layout(tp=self.layout.tp, pp=self.layout.pp)
        spec = context.spec
        distributed.initialize(
            self.layout, self.rank, address=address, port=port, seed=spec.training.seed
        )
        from megatron_backend.training.step import Trainer

        self.context = context
        algorithm = load_algorithm(spec.algorithm)
        model = self._starting_model()
        size = spec.training.micro_batch_size
        self._trainer = Trainer(
            model,
            self._config,
            self.layout,
            loss=algorithm,
            optimizer_spec=spec.optimizer,
            dtype=self.dtype,
            temperature=spec.rollout.temperature if spec.algorithm.online else 1.0,
            micro_batch_size=None if size == "auto" else size,
            reference=self._copy(model) if algorithm.needs_reference else None,
        )

    def train_step(
        self, batch: Batch, normalizer: Normalizer, *, learning_rate: float
    ) -> StepShare:
        """One optimizer step on the whole batch; see `Trainer.train_step`."""
        return self.trainer.train_step(batch, normalizer, learning_rate=learning_rate)

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor | None:
        """Log-probs of this rank's rows; see `gather_rows`."""
        return self.trainer.log_probs(batch, model=model)

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepShare:
        """The loss of the whole batch without gradient."""
        return self.trainer.evaluate_loss(batch, normalizer)

    def export_hf(self, folder: str) -> None:
        """Writes Hugging Face weights and config into `folder`, which must be empty.

        Every rank must call it; rank 0 writes.
        """
        from megatron_backend.models.export import export_hf

        export_hf(self.model, self.config, self.layout, Path(folder))

    def shutdown(self) -> None:
        """Leaves the process groups."""
        self._trainer = None
        distributed.shutdown()

    def _starting_model(self) -> "list[GPTModel]":
        from megatron_backend.models.weights import load_weights

        assert self.context is not None
        model = self._build()
        start = self.context.model
        if start.kind == "checkpoint":
            from megatron_backend.checkpoint.model_weights import load_model_weights

            load_model_weights(model[0], Path(str(start.weights)))
        else:
            source: TensorSource = (
                RandomTensors(self.config, self.context.spec.training.seed)
                if start.kind == "random"
                else SafetensorsFolder(Path(str(start.weights)))
            )
            load_weights(model, self.config, source)
        return model

    def _build(self) -> "list[GPTModel]":
        from megatron_backend.models.build import build_model

        assert self.context is not None
        return build_model(
            self.config,
            self.layout,
            dtype=self.dtype,
            max_length=self.context.spec.training.max_length,
        )

    def _copy(self, model: "list[GPTModel]") -> "list[GPTModel]":
        copy = self._build()
        for target, source in zip(copy, model, strict=True):
            target.load_state_dict(source.state_dict())
        return copy


def gather_rows(layout: Layout, pieces: Sequence[Tensor | None]) -> Tensor:
    """Rows of a whole batch, in order, from what all ranks answered."""
    rows = [pieces[rank] for rank in layout.output_ranks]
    return torch.cat([row for row in rows if row is not None])
