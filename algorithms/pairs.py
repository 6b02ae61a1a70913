"""What algorithms that learn from pairs share.

Row 2i of a batch is the answer that was chosen, row 2i + 1 the one that was rejected
(`Batch.unit` is 2). A pair one of whose rows has no trained token says nothing: it is left out of
the loss, of the metrics and of the count that the loss is divided by. Were it only masked, its
margin would be 0 and each such pair would add log 2 to the loss.
"""

import torch
from torch import Tensor

from algorithms.batch import Batch, Normalizer

type Sums = dict[str, tuple[float, float]]
"""See `LossOutput.sums`."""


def whole_pairs(per_row: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The numbers of chosen and of rejected answers, [P] each, of pairs that are trained on.

    Args:
        per_row: [B], one number for each row.
        batch: 2 rows a pair.

    Raises:
        ValueError: the batch is not made of pairs.
    """
    if batch.unit != 2:
        raise ValueError(f"a loss on pairs was given a batch of {batch.unit} rows a unit, not 2")
    pairs = per_row.reshape(-1, 2)[_whole(batch)]
    return pairs[:, 0], pairs[:, 1]


def mean_over_pairs(losses: Tensor, normalizer: Normalizer, dtype: torch.dtype) -> Tensor:
    """This micro-batch's share of the mean of `losses` [P] over the step's pairs."""
    return (losses.sum() / normalizer.units).to(dtype)


def all_of(values: Tensor) -> tuple[float, float]:
    """(sum, count) of a metric's values."""
    return float(values.detach().sum()), float(values.numel())


def reward_metrics(chosen: Tensor, rejected: Tensor, batch: Batch) -> Sums:
    """What is worth watching of any two rewards.

    Args:
        chosen: [P] rewards of chosen answers.
        rejected: [P] rewards of rejected ones.
        batch: the pairs, with those that were left out.
    """
    return {
        "reward_chosen": all_of(chosen),
        "reward_rejected": all_of(rejected),
        "reward_margin": all_of(chosen - rejected),
        "reward_accuracy": all_of((chosen > rejected).double()),
        "pairs_left_out": all_of(_halves(batch)),
    }


def _halves(batch: Batch) -> Tensor:
    """[pairs with a trained token] 1 where it is one answer's only; what fills a batch up has
    none."""
    trained = (batch.loss_mask.sum(dim=1) > 0).view(-1, 2)
    return (~trained.all(dim=1)).double()[trained.any(dim=1)]


def _whole(batch: Batch) -> Tensor:
    """[B / 2] whether both rows of a pair have a trained token."""
    return (batch.loss_mask.sum(dim=1) > 0).view(-1, 2).all(dim=1)
