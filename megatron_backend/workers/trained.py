"""The models that a job trains, as its document wants them: the one it is about, and a critic.

This module imports Megatron: ranks only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel

from algorithms.algorithm import Algorithm, load_algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs
from megatron_backend.checkpoint.contents import CRITIC
from megatron_backend.checkpoint.model_weights import holds_value_model
from megatron_backend.models.build import build_model
from megatron_backend.precision import torch_dtype
from megatron_backend.training.step import Trainer
from megatron_backend.workers.weights import load_resolved
from service.spec import JobContext, ResolvedModel
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig


def build_trainer(context: JobContext, layout: Layout, *, fresh: bool) -> Trainer:
    """The model that a job is about, with a frozen copy where its algorithm keeps a reference.

    Args:
        context: the job.
        layout: of all ranks.
        fresh: with starting weights; else a checkpoint is loaded next. A reference has them always.

    Raises:
        ValueError, FileNotFoundError, KeyError: see `load_resolved`.
    """
    spec, config = context.spec, ModelConfig.from_hf(context.model.config)
    model = _build(context, config, layout, spec.algorithm.head)
    if fresh or spec.algorithm.keeps_reference:
        _load(context, model, config, context.model)
    reference = None
    if spec.algorithm.keeps_reference:
        reference = _build(context, config, layout, spec.algorithm.head)
        for target, source in zip(reference, model, strict=True):
            target.load_state_dict(source.state_dict())
    return Trainer(
        model,
        config,
        layout,
        loss=load_algorithm(spec.algorithm),
        optimizer_spec=spec.optimizer,
        temperature=spec.rollout.temperature if spec.algorithm.online else 1.0,
        reference=reference,
        **_settings(context),
    )


def build_critic(context: JobContext, layout: Layout, *, fresh: bool) -> Trainer | None:
    """The value model of a job whose algorithm has one: from weights of its own, or from the
    policy's with a new head.

    Args:
        context: the job.
        layout: of all ranks, which is the policy's.
        fresh: with starting weights; else a checkpoint is loaded next.

    Raises:
        ValueError, FileNotFoundError, KeyError: see `load_resolved`.
    """
    optimizer = context.spec.critic_optimizer
    if optimizer is None:
        return None
    own = context.other_models.get("critic")
    start = context.model if own is None else own
    config = ModelConfig.from_hf(start.config)
    config.check_layout(tp=layout.tp, pp=layout.pp, ep=layout.ep)
    model = _build(context, config, layout, "value")
    if fresh:
        # Where the critic is to come from a job that has one, it is not that job's policy.
        prefix = CRITIC if own is not None and _has_critic(own) else ""
        _load(context, model, config, start, prefix=prefix)
    return Trainer(
        model,
        config,
        layout,
        loss=ValueLoss(load_algorithm(context.spec.algorithm)),
        optimizer_spec=optimizer,
        **_settings(context),
    )


class ValueLoss:
    """An algorithm's loss of its critic."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """See `Algorithm.value_loss`."""
        return self._algorithm.value_loss(outputs, batch, normalizer)


def _settings(context: JobContext) -> dict[str, Any]:
    """How every model of the job is trained."""
    training = context.spec.training
    return {
        "dtype": torch_dtype(context.spec.precision.dtype),
        "micro_batch_size": training.fixed_micro_batch_size,
        "micro_batch_tokens": training.micro_batch_tokens,
        "packing": training.packing,
        "fp8": context.spec.precision.fp8,
    }


def _build(context: JobContext, config: ModelConfig, layout: Layout, head: Head) -> list[GPTModel]:
    spec = context.spec
    return build_model(
        config,
        layout,
        dtype=torch_dtype(spec.precision.dtype),
        max_length=spec.training.max_length,
        recompute=spec.training.recompute,
        fp8=spec.precision.fp8,
        head=head,
    )


def _load(
    context: JobContext,
    model: Sequence[GPTModel],
    config: ModelConfig,
    start: ResolvedModel,
    *,
    prefix: str = "",
) -> None:
    """Starting weights of a model that is trained: a value head may be new."""
    seed = context.spec.training.seed
    load_resolved(model, config, start, seed=seed, new_head=True, prefix=prefix)


def _has_critic(start: ResolvedModel) -> bool:
    return start.kind == "checkpoint" and holds_value_model(Path(str(start.weights)), prefix=CRITIC)
