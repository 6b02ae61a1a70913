"""What the ranks of a value model's tests do, their batches, and a loss on all that it says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.batch import (
    Batch,
    LossOutput,
    Normalizer,
    Outputs,
    masked_pair,
    value_outputs,
)
from megatron_backend.training.shares import RowShare, StepShare
from service.spec.layout import Layout
from tests.megatron_backend.training.training_runs import (
    LEARNING_RATE,
    build_trainer,
    random_batch,
)

if TYPE_CHECKING:
    from megatron_backend.training.step import Trainer


class PairsAndReturns:
    """Bradley and Terry's loss on scores, beside squared errors of values against returns."""

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        said = value_outputs(outputs)
        chosen, rejected = said.scores.view(-1, 2).unbind(1)
        pairs = -F.logsigmoid(chosen - rejected)
        errors = (said.values - batch.per_token["returns"]).square() * batch.loss_mask
        return LossOutput(
            loss=pairs.sum() / normalizer.units + errors.sum() / normalizer.tokens,
            sums={
                "accuracy": (float((chosen > rejected).sum()), float(len(chosen))),
                "value": masked_pair(said.values, batch.loss_mask),
            },
        )


def random_pairs(rows: int = 6, length: int = 13, *, seed: int = 3, vocab: int = 101) -> Batch:
    """`random_batch` in units of two, with a return for each token."""
    batch = random_batch(rows, length, seed=seed, vocab=vocab)
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(rows, length, generator=generator)
    return replace(batch.with_per_token(returns=returns), unit=2)


def value_trainer(name: str, layout: Layout, **options: Any) -> "Trainer":
    """A trainer of a small random value model, the same in every layout."""
    return build_trainer(name, layout, PairsAndReturns(), head="value", **options)


def read(
    _rank: int, names: Sequence[str], layout: Layout, batch: Batch, ways: Sequence[dict[str, Any]]
) -> list[list[tuple[RowShare | None, RowShare | None]]]:
    """Values and scores of this rank's rows, of each model in each way."""
    answers = []
    for name in names:
        trainers = [value_trainer(name, layout, **way) for way in ways]
        answers.append([(trainer.values(batch), trainer.scores(batch)) for trainer in trainers])
    return answers


def steps(
    _rank: int, name: str, layout: Layout, batches: Sequence[Batch], options: dict[str, Any]
) -> list[StepShare]:
    """One step for each batch."""
    trainer = value_trainer(name, layout, **options)
    return [
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
        for batch in batches
    ]


def head_after(_rank: int, name: str, layout: Layout, batches: Sequence[Batch]) -> Tensor:
    """This rank's value head after one step for each batch."""
    trainer = value_trainer(name, layout)
    for batch in batches:
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
    head: Tensor = trainer.model[-1].output_layer.weight.detach()
    return head.clone()
