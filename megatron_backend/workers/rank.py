"""What one rank does. Plain Python: `workers.group` puts one into each Ray actor.

Every rank is called with the same arguments. It takes its own rows of a batch by itself and answers
for them only: `merge_step` and `gather_rows` of `training.shares` make one answer of all ranks'.

This module imports Megatron only inside `setup`, so that the driver can import it for its types.
"""

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from algorithms.batch import Batch, Normalizer
from algorithms.protocols import Completion, Sampling
from megatron_backend.checkpoint.contents import CRITIC
from megatron_backend.models.tensors import SafetensorsFolder
from megatron_backend.precision import torch_dtype
from megatron_backend.runtime import distributed
from megatron_backend.training.shares import RowShare, StepShare
from service.spec import JobContext
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_backend.checkpoint.staging import Written
    from megatron_backend.checkpoint.torch_dist import StateWriter
    from megatron_backend.generation.rank import GenerationRank
    from megatron_backend.training.step import Trainer


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
        self._critic: Trainer | None = None
        self._config: ModelConfig | None = None
        self._generation: GenerationRank | None = None
        self._saves: StateWriter | None = None

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
        return self.trainer.model

    @property
    def critic(self) -> "Trainer":
        """The value model that is trained beside the policy, and its optimizer."""
        if self._critic is None:
            raise RuntimeError("this job has no critic: its algorithm needs none")
        return self._critic

    @property
    def generation(self) -> "GenerationRank":
        """The generation copy."""
        if self._generation is None:
            raise RuntimeError("this job has no generation copy: call setup_generation first")
        return self._generation

    @property
    def dtype(self) -> torch.dtype:
        """Format of parameters and activations."""
        if self.context is None:
            raise RuntimeError(f"rank {self.rank} has no job yet: call setup first")
        return torch_dtype(self.context.spec.precision.dtype)

    def setup(self, context: JobContext, address: str, port: int, *, fresh: bool = True) -> None:
        """Joins the other ranks, builds the model, loads the job's starting weights.

        Args:
            context: the job.
            address: host name of rank 0.
            port: a free port on it.
            fresh: False where `load_state` comes next, so that weights need not be read twice. A
                reference model is the one that the job started from all the same.

        Raises:
            ValueError: the model's config or the layout is not supported.
            FileNotFoundError, KeyError: weights are missing.
        """
        self._config = ModelConfig.from_hf(context.model.config)
        self._config.check_layout(tp=self.layout.tp, pp=self.layout.pp, ep=self.layout.ep)
        self.layout.stage_layers(self._config.num_layers)
        spec = context.spec
        distributed.initialize(
            self.layout, self.rank, address=address, port=port, seed=spec.training.seed
        )
        from megatron_backend.workers.trained import build_critic, build_trainer

        self.context = context
        self._trainer = build_trainer(context, self.layout, fresh=fresh)
        self._critic = build_critic(context, self.layout, fresh=fresh)

    def train_step(
        self,
        batch: Batch,
        normalizer: Normalizer,
        *,
        learning_rate: float,
        norm_limit: float = math.inf,
        loss_limit: float = math.inf,
        copies: Sequence[int] | None = None,
        model: Literal["policy", "critic"] = "policy",
    ) -> StepShare:
        """One optimizer step on the whole batch; see `Trainer.train_step`."""
        trainer = self.trainer if model == "policy" else self.critic
        return trainer.train_step(
            batch,
            normalizer,
            learning_rate=learning_rate,
            norm_limit=norm_limit,
            loss_limit=loss_limit,
            copies=copies,
        )

    def values(self, batch: Batch) -> RowShare | None:
        """The critic's values of this rank's rows; see `gather_rows`."""
        return self.critic.values(batch)

    def tied_difference(self) -> float | None:
        """See `training.tied`; the largest over this rank's slices. A critic has one embedding."""
        from megatron_backend.training.tied import tied_difference

        return tied_difference(self.model)

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> RowShare | None:
        """Log-probs of this rank's rows; see `gather_rows`."""
        return self.trainer.log_probs(batch, model=model)

    def scores(self, batch: Batch) -> RowShare | None:
        """[rows] scores of this rank's rows, by a trained reward model; see `gather_rows`."""
        return self.trainer.scores(batch)

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepShare:
        """The loss of the whole batch without gradient."""
        return self.trainer.evaluate_loss(batch, normalizer)

    def export_hf(self, folder: str) -> None:
        """Writes Hugging Face weights and config into `folder`, which must be empty.

        Every rank must call it; rank 0 writes, into the same files that the model came from.
        """
        from megatron_backend.models.export import export_hf

        assert self.context is not None
        start = self.context.model
        like = None
        if start.kind == "huggingface":
            like = SafetensorsFolder(Path(str(start.weights))).file_of
        export_hf(self.model, self.config, self.layout, Path(folder), like=like)

    def check_export(self, folder: str) -> str | None:
        """The first of this rank's parameters that `folder` has otherwise; None for none."""
        from megatron_backend.models.weights import differing_parameter

        return differing_parameter(self.model, self.config, SafetensorsFolder(Path(folder)))

    def setup_generation(
        self, layout: Layout, stop_token_ids: Sequence[int], max_length: int
    ) -> None:
        """Makes the generation copy, after `setup`; see `GenerationRank`."""
        from megatron_backend.generation.rank import GenerationRank

        self._generation = GenerationRank(
            self.config,
            layout,
            padded_vocab=self.model[0].vocab_size,
            stop_token_ids=stop_token_ids,
            max_length=max_length,
            dtype=self.dtype,
        )

    def sync_weights(self, version: int) -> None:
        """See `GenerationRank.sync`."""
        self.generation.sync(self.model, version)

    def generate(
        self, prompts: Sequence[Sequence[int]], indices: Sequence[int], sampling: Sampling
    ) -> list[Completion] | None:
        """See `GenerationRank.generate`; None on ranks that another one speaks for."""
        completions = self.generation.generate(prompts, indices, sampling)
        return completions if self.rank in self.generation.layout.output_ranks else None

    def begin_save(self, staged: str, background: bool) -> "Written | None":
        """See `checkpoint.torch_dist.StateWriter.begin`."""
        from megatron_backend.checkpoint.torch_dist import StateWriter

        if self._saves is None:
            self._saves = StateWriter()
        return self._saves.begin(Path(staged), self._trained, background=background)

    def save_again(self, staged: str) -> None:
        """See `checkpoint.torch_dist.StateWriter.again`."""
        assert self._saves is not None
        self._saves.again(Path(staged))

    def save_result(self, wait: bool) -> "Written | None":
        """See `checkpoint.torch_dist.StateWriter.result`."""
        assert self._saves is not None
        return self._saves.result(wait=wait)

    def load_state(self, checkpoint: str, same_layout: bool) -> None:
        """See `checkpoint.torch_dist.load_state`."""
        from megatron_backend.checkpoint.torch_dist import load_state

        load_state(Path(checkpoint), self._trained, same_layout=same_layout)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """[B, T, V] on the first rank that has them, None on the others."""
        from megatron_backend.workers.logits import whole_logits

        logits = whole_logits(
            self.trainer.chunks,
            tokens.to(device=distributed.device()),
            vocab_size=self.config.vocab_size,
        )
        speaks = self.rank == self.layout.output_ranks[0]
        return logits.cpu() if logits is not None and speaks else None

    def shutdown(self) -> None:
        """Lets go of the model and leaves the process groups; `setup` may follow."""
        if self._saves is not None:
            self._saves.close()
        self._trainer = self._critic = self._generation = self._saves = None
        gc.collect()
        distributed.shutdown()

    @property
    def _trained(self) -> "dict[str, Trainer]":
        """What checkpoints hold, by the prefix of its names."""
        critic = {} if self._critic is None else {CRITIC: self._critic}
        return {"": self.trainer} | critic
