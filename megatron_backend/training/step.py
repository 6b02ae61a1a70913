"""The trained model on one rank: steps, log-probs, losses.

Every rank gets the whole batch and takes its own rows, so the driver need not know the layout. What
is summed over ranks is the loss, already divided by the whole step's counts (`Normalizer`): hence
no gradient is averaged anywhere, neither over micro-batches nor over data-parallel ranks, and the
split changes nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from algorithms.batch import Batch, MetricSums, Normalizer, PolicyOutputs
from algorithms.protocols import Loss
from megatron_backend.models.config import ModelConfig
from megatron_backend.runtime.distributed import device
from megatron_backend.training import forward, optimizer
from megatron_backend.training.micro_batch import MicroBatch, micro_batches
from megatron_backend.training.shares import StepShare
from service.spec import OptimizerSpec
from service.spec.layout import Layout


class Trainer:
    """One rank's part of the trained model and its optimizer.

    Attributes:
        chunks: the data-parallel wrappers of this rank's chunks; `chunks[i].module` is a GPTModel.
        optimizer: Megatron's.
        reference: the frozen model as the job started, where one is kept.
    """

    def __init__(
        self,
        model: Sequence[GPTModel],
        config: ModelConfig,
        layout: Layout,
        *,
        loss: Loss,
        optimizer_spec: OptimizerSpec,
        dtype: torch.dtype,
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        reference: Sequence[GPTModel] | None = None,
    ) -> None:
        self._config, self._layout, self._loss = config, layout, loss
        self._temperature, self._micro_batch_size = temperature, micro_batch_size
        self._rank = layout.coordinates(torch.distributed.get_rank())
        self.chunks = [optimizer.wrap(chunk) for chunk in model]
        self.optimizer = optimizer.build_optimizer(self.chunks, optimizer_spec, dtype=dtype)
        self.reference = None if reference is None else [forward.freeze(c) for c in reference]
        for chunk in model:
            chunk.config.finalize_model_grads_func = _sum_gradients

    def train_step(
        self, batch: Batch, normalizer: Normalizer, *, learning_rate: float
    ) -> StepShare:
        """Forward, loss, backward, clip, and one optimizer step unless something is not finite.

        Args:
            batch: the whole batch, the same on every rank.
            normalizer: of the whole step.
            learning_rate: of this step.
        """
        self._set_training(True)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss, sums = self._run(batch, normalizer, backward=True)
        norm = optimizer.gradient_norm(self.optimizer)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            optimizer.set_learning_rate(self.optimizer, learning_rate)
            optimizer.take_step(self.optimizer, norm)
        return StepShare(loss=loss, gradient_norm=norm, finite=finite, sums=sums)

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepShare:
        """The loss without gradient."""
        self._set_training(False)
        with torch.no_grad():
            loss, sums = self._run(batch, normalizer, backward=False)
        return StepShare(loss=loss, gradient_norm=0.0, finite=math.isfinite(loss), sums=sums)

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor | None:
        """[rows, T] log-probs of this rank's rows; None where they are not computed.

        Raises:
            RuntimeError: no reference model is kept.
        """
        chunks = self.chunks if model == "policy" else self.reference
        if chunks is None:
            raise RuntimeError("this job keeps no reference model: its algorithm needs none")

        def finish(outputs: PolicyOutputs, _micro: MicroBatch) -> tuple[Tensor, Tensor]:
            return outputs.log_probs.new_zeros(()), outputs.log_probs

        self._set_training(False)
        batches = self._micro_batches(batch)
        with torch.no_grad():
            pieces = self._forward(chunks, batches, finish, trained_only=False, backward=False)
        if not self._speaks:
            return None
        result = torch.zeros(batch.tokens.shape)
        for micro, piece in zip(batches, pieces, strict=True):
            result[micro.rows, : piece.shape[1]] = piece.cpu()
        share = self._layout.share(len(batch), self._rank.dp)
        return result[share.start : share.stop]

    @property
    def _speaks(self) -> bool:
        """True on the rank whose results stand for its data-parallel copy."""
        return self._rank.tp == 0 and self._rank.pp == self._layout.pp - 1

    def _set_training(self, training: bool) -> None:
        """Switches modes only where it changes something: it walks through every module."""
        for chunk in self.chunks:
            if chunk.training != training:
                chunk.train(training)

    def _run(
        self, batch: Batch, normalizer: Normalizer, *, backward: bool
    ) -> tuple[float, Mapping[str, tuple[float, float]]]:
        """The step's whole loss, the same on every rank, and this rank's share of the metrics."""

        def finish(outputs: PolicyOutputs, micro: MicroBatch) -> tuple[Tensor, Any]:
            if not len(micro.batch):
                return outputs.log_probs.sum(), None
            result = self._loss.loss(outputs, micro.batch, normalizer)
            return result.loss, (result.loss.detach(), result.sums)

        batches = self._micro_batches(batch)
        collected = self._forward(
            self.chunks, batches, finish, trained_only=True, backward=backward
        )
        metrics, loss = MetricSums(), torch.zeros((), dtype=torch.float64, device=device())
        if self._speaks:
            for value in filter(None, collected):
                loss += value[0]
                metrics.add(value[1])
        torch.distributed.all_reduce(loss)
        return float(loss), metrics.sums()

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        return micro_batches(
            batch,
            self._layout.share(len(batch), self._rank.dp),
            size=self._micro_batch_size,
            stages=self._layout.pp,
            device=device(),
        )

    def _forward(
        self,
        chunks: Sequence[torch.nn.Module],
        batches: list[MicroBatch],
        finish: forward.Finish,
        *,
        trained_only: bool,
        backward: bool,
    ) -> list[Any]:
        return forward.run(
            chunks,
            batches,
            finish,
            vocab_size=self._config.vocab_size,
            temperature=self._temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            trained_only=trained_only,
            backward=backward,
        )


def _sum_gradients(
    model: list[torch.nn.Module], _num_tokens: Tensor | None = None, **groups: Any
) -> None:
    """Megatron's reductions over all ranks, without its division by the number of tokens."""
    finalize_model_grads(model, None, **groups)
