"""A loss on everything that a policy says of a token, and ranks that train with it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, policy_outputs
from megatron_backend.training.shares import StepShare
from service.spec import AlgorithmSpec, OptimizerSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.layout_runs import write_gradient
from tests.megatron_backend.training.training_runs import build_trainer, random_batch

CANDIDATES = 5
TEMPERATURE = 0.7


class EverythingSpec(AlgorithmSpec):
    """Spec of `Everything`."""

    type: str = "everything"
    implementation: ClassVar[str] = f"{__name__}:Everything"
    online: ClassVar[bool] = False
    summary: ClassVar[str] = "Log-probs, entropies and candidates, each token with its own weight"


class Everything(Algorithm):
    """See the spec."""

    def __init__(self, _spec: Any) -> None:
        pass

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        said = policy_outputs(outputs)
        assert said.candidate_log_probs is not None
        loss = weighed(said.log_probs, said.entropy, said.candidate_log_probs, batch)
        return LossOutput(loss=loss / normalizer.tokens, sums={})


def weighed(log_probs: Tensor, entropy: Tensor, candidates: Tensor, batch: Batch) -> Tensor:
    """Each trained token's own weight for each of its values."""
    weights = batch.per_token["advantages"], batch.per_token["old_log_probs"]
    total = log_probs * weights[0] + entropy * weights[1]
    total = total + (candidates * batch.candidates["weights"]).sum(-1)
    return (total * batch.loss_mask).sum()


def batch_with_candidates() -> Batch:
    """Random rows; among the candidates of a token is the token itself, in its first place."""
    batch = random_batch(rows=7)
    generator = torch.Generator().manual_seed(11)
    shape = (*batch.tokens.shape, CANDIDATES)
    ids = torch.randint(0, 101, shape, generator=generator)
    ids[..., 0] = batch.tokens
    weights = torch.randn(shape, generator=generator)
    return replace(batch, candidates={"candidate_ids": ids, "weights": weights})


def train(
    _rank: int, layout: Layout, names: Sequence[str], options: Sequence[dict[str, Any]], at: Path
) -> list[list[StepShare]]:
    """One step of each model under each of `options`; gradients go to `at`/MODEL-INDEX."""
    results = []
    batch = batch_with_candidates()
    for name in names:
        config = ModelConfig.from_hf(CONFIGS[name])
        shares = []
        for index, chosen in enumerate(options):
            trainer = build_trainer(
                name,
                layout,
                EverythingSpec(),
                optimizer_spec=OptimizerSpec(clip_grad=0.0),
                temperature=TEMPERATURE,
                **chosen,
            )
            shares.append(trainer.train_step(batch, Normalizer.of(batch), learning_rate=1e-4))
            write_gradient(trainer, layout, config, at / f"{name}-{index}")
        results.append(shares)
    return results


def train_without_entropy(_rank: int, algorithm: AlgorithmSpec) -> StepShare:
    """One step of an algorithm, in which nothing may compute the gradient of an entropy."""

    def no(*_: object) -> Tensor:
        raise AssertionError("the gradient of an entropy was computed")

    kept, torch.special.entr = torch.special.entr, no
    try:
        batch = random_batch()
        trainer = build_trainer("qwen3", Layout(), algorithm)
        return trainer.train_step(batch, Normalizer.of(batch), learning_rate=1e-4)
    finally:
        torch.special.entr = kept
