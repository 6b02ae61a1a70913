"""A trained model on one rank: steps, losses, and what it says of a batch.

Every rank gets the whole batch and takes its own rows, so the driver need not know the layout. What
is summed over ranks is the loss, already divided by the whole step's counts (`Normalizer`): hence
no gradient is averaged anywhere, neither over micro-batches nor over data-parallel ranks, and the
split changes nothing.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from algorithms.batch import (
    Batch,
    MetricSums,
    Normalizer,
    Outputs,
    PolicyOutputs,
    policy_outputs,
    value_outputs,
)
from algorithms.protocols import Loss
from megatron_backend.runtime.distributed import device
from megatron_backend.training import forward, optimizer
from megatron_backend.training.micro_batch import (
    Limits,
    MicroBatch,
    micro_batches,
    plan_micro_batches,
)
from megatron_backend.training.reading import joined
from megatron_backend.training.sequence import Cut
from megatron_backend.training.shares import RowShare, StepShare
from megatron_backend.training.step_memory import StepMemory
from megatron_backend.training.values import read_values
from service.spec import Fp8Spec, OptimizerSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig


class Trainer:
    """One rank's part of a trained model and its optimizer.

    Its loss is given `PolicyOutputs`, or `ValueOutputs` where the model has a value head.

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
        micro_batch_tokens: int = 16384,
        packing: bool = True,
        fp8: Fp8Spec | None = None,
        reference: Sequence[GPTModel] | None = None,
    ) -> None:
        self._config, self._layout, self._loss = config, layout, loss
        self._temperature = temperature
        self._read = read_values if model[0].head == "value" else forward.read_policy
        self._rank = layout.coordinates(torch.distributed.get_rank())
        self._cut = Cut.of(layout, packing=packing, cp_rank=self._rank.cp, fp8=fp8)
        self._limits = Limits.of(layout, tokens=micro_batch_tokens, rows=micro_batch_size)
        self.chunks = [optimizer.wrap(chunk, fp8=fp8) for chunk in model]
        self.optimizer = optimizer.build_optimizer(
            self.chunks, optimizer_spec, dtype=dtype, fp8=fp8
        )
        self.reference = None if reference is None else [forward.freeze(c) for c in reference]
        self._tokens = 1
        self._copies: Sequence[int] = range(layout.dp)
        for chunk in model:
            chunk.config.finalize_model_grads_func = _weakly(self._sum_gradients)
            chunk.config.moe_grad_scale_func = _weakly(self._balance_scale)
            if dtype == torch.float16:
                chunk.config.grad_scale_func = _weakly(self.optimizer.scale_loss)

    @property
    def model(self) -> list[GPTModel]:
        """This rank's chunks without their wrappers."""
        return [chunk.module for chunk in self.chunks]

    def train_step(
        self,
        batch: Batch,
        normalizer: Normalizer,
        *,
        learning_rate: float,
        norm_limit: float = math.inf,
        loss_limit: float = math.inf,
        copies: Sequence[int] | None = None,
    ) -> StepShare:
        """Forward, loss, backward, clip, and one optimizer step unless something is not finite.

        A step that is not taken changes nothing (see also `step_memory`).

        Args:
            batch: the whole batch, the same on every rank.
            normalizer: of the whole step.
            learning_rate: of this step.
            norm_limit: the step is not taken where the gradient norm is above it.
            loss_limit: nor where the loss is above this one.
            copies: the data-parallel ranks that compute it; None for all. The others take part in
                what all do together, and add nothing.
        """
        self._set_training(True)
        self._tokens = int(batch.lengths.sum())
        self._copies = range(self._layout.dp) if copies is None else copies
        before = StepMemory.of(self.model, self.optimizer)
        try:
            loss, sums, norm = self._gradient(batch, normalizer, before)
        finally:
            self._copies = range(self._layout.dp)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite and norm <= norm_limit and loss <= loss_limit:
            optimizer.set_learning_rate(self.optimizer, learning_rate)
            optimizer.take_step(self.optimizer, norm)
        else:
            before.put_back()
        return StepShare(loss=loss, gradient_norm=norm, finite=finite, sums=sums)

    def _gradient(
        self, batch: Batch, normalizer: Normalizer, before: StepMemory
    ) -> tuple[float, Mapping[str, tuple[float, float]], float]:
        """The loss, the metrics, and the norm of the gradient, which is in the buffers.

        A gradient that overflows in fp16 alone says that the loss was scaled too much: it is
        computed again at a smaller scale.
        """
        while True:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            scale = optimizer.loss_scale(self.optimizer)
            loss, sums = self._run(batch, normalizer, backward=True)
            norm = optimizer.gradient_norm(self.optimizer)
            lowered = optimizer.loss_scale(self.optimizer) < scale
            if not (lowered and math.isfinite(loss)):
                return loss, sums, norm
            before.forget_passes()

    def _balance_scale(self) -> Tensor:
        """What load-balancing losses are weighted by: they count tokens (see `models.router`)."""
        scale: Tensor = self.optimizer.get_loss_scale() / self._tokens
        return scale

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepShare:
        """The loss without gradient."""
        self._set_training(False)
        with torch.no_grad():
            loss, sums = self._run(batch, normalizer, backward=False)
        return StepShare(loss=loss, gradient_norm=0.0, finite=math.isfinite(loss), sums=sums)

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> RowShare | None:
        """Log-probs of this rank's rows, of the trained tokens; None where they are not computed.

        Raises:
            RuntimeError: no reference model is kept.
            TypeError: the model has a value head.
        """
        chunks = self.chunks if model == "policy" else self.reference
        if chunks is None:
            raise RuntimeError("this job keeps no reference model: its algorithm needs none")
        return self._rows(chunks, batch, lambda outputs: policy_outputs(outputs).log_probs)

    def values(self, batch: Batch) -> RowShare | None:
        """Values of this rank's rows, as `ValueOutputs.values`; None where they are not computed.

        Raises:
            TypeError: the model has no value head.
        """
        return self._rows(self.chunks, batch, lambda outputs: value_outputs(outputs).values)

    def scores(self, batch: Batch) -> RowShare | None:
        """[rows] scores of this rank's rows; None where they are not computed.

        Raises:
            TypeError: the model has no value head.
        """
        return self._rows(self.chunks, batch, lambda outputs: value_outputs(outputs).scores)

    def _rows(
        self,
        chunks: Sequence[torch.nn.Module],
        batch: Batch,
        pick: Callable[[Outputs], Tensor],
    ) -> RowShare | None:
        """What `pick` takes of a model's outputs, without gradient; 0 behind each row's end."""

        def finish(outputs: Outputs, _micro: MicroBatch) -> tuple[Tensor, Tensor]:
            picked = pick(outputs)
            return picked.new_zeros(()), picked.cpu()

        self._set_training(False)
        batches = self._micro_batches(batch)
        with torch.no_grad():
            pieces = self._forward(chunks, batches, finish, backward=False)
        if not self._speaks:
            return None
        rows = [row for micro in batches for row in micro.rows]
        return RowShare(rows=rows, values=joined(pieces, batch.tokens.shape[1]).numpy())

    @property
    def _speaks(self) -> bool:
        """True on the rank whose results stand for its data-parallel copy."""
        rank = self._rank
        return rank.tp == 0 and rank.cp == 0 and rank.pp == self._layout.pp - 1

    def _set_training(self, training: bool) -> None:
        """Switches modes only where it changes something: it walks through every module."""
        for chunk in self.chunks:
            if chunk.training != training:
                chunk.train(training)

    def _run(
        self, batch: Batch, normalizer: Normalizer, *, backward: bool
    ) -> tuple[float, Mapping[str, tuple[float, float]]]:
        """The step's whole loss, the same on every rank, and this rank's share of the metrics."""

        def finish(outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Any]:
            if not len(micro.batch):
                return _nothing(outputs), None
            result = self._loss.loss(outputs, micro.batch, normalizer)
            return result.loss, (result.loss.detach(), result.sums)

        batches = self._micro_batches(batch)
        collected = self._forward(self.chunks, batches, finish, backward=backward)
        metrics, loss = MetricSums(), torch.zeros((), dtype=torch.float64, device=device())
        if self._speaks:
            for value in filter(None, collected):
                loss += value[0]
                metrics.add(value[1])
        torch.distributed.all_reduce(loss)
        return float(loss), metrics.sums()

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        plan = plan_micro_batches(
            batch.lengths.tolist(),
            ranks=len(self._copies),
            limits=self._limits,
            packing=self._cut.packing,
            factor=self._cut.row_factor,
            unit=batch.unit,
        )
        if self._rank.dp in self._copies:
            mine = plan[self._copies.index(self._rank.dp)]
        else:
            mine = [[] for _ in plan[0]]
        return micro_batches(batch, mine, self._cut, device=device())

    def _sum_gradients(
        self, model: list[torch.nn.Module], _num_tokens: Tensor | None = None, **groups: Any
    ) -> None:
        """Megatron's reductions over all ranks, without its division by the number of tokens."""
        if self._rank.dp not in self._copies:
            # Nothing, unless the device is broken.
            for chunk in self.chunks:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    buffer.grad_data.zero_()
        finalize_model_grads(model, None, **groups)

    def _forward(
        self,
        chunks: Sequence[torch.nn.Module],
        batches: list[MicroBatch],
        finish: forward.Finish,
        *,
        backward: bool,
    ) -> list[Any]:
        return forward.run(
            chunks,
            batches,
            finish,
            vocab_size=self._config.vocab_size,
            temperature=self._temperature,
            softcap=self._config.final_softcap,
            backward=backward,
            read=self._read,
        )


def _nothing(outputs: Outputs) -> Tensor:
    """0, with a graph that leads back into the model: the sum of what is said of no rows."""
    if isinstance(outputs, PolicyOutputs):
        return outputs.log_probs.sum()
    return outputs.values.sum() + outputs.scores.sum()


def _weakly[R](method: Callable[..., R]) -> Callable[..., R]:
    """The method, without keeping its object alive.

    A model's config is held by hooks inside autograd, where the garbage collector does not look:
    what it refers to is never freed, nor are the process groups that belong to it.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **options: Any) -> R:
        found = reference()
        assert found is not None, "the trainer is gone, but its model still trains"
        return found(*arguments, **options)

    return call
