"""One loss, however the batch was split."""

from typing import get_args

import pytest
import torch

from algorithms.batch import Batch, Normalizer
from algorithms.losses.aggregation import aggregate
from service.spec.algorithms.aggregation import LossAggregation


def _step(values: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, Normalizer]:
    length = max(map(len, values))
    rows = [row + [99.0] * (length - len(row)) for row in values]
    padded = torch.tensor(rows, dtype=torch.float64)
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (length - len(row)) for row in values])
    batch = Batch(tokens=padded.long(), lengths=mask.sum(1).long(), loss_mask=mask)
    return padded.requires_grad_(), mask, Normalizer.of(batch)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, 1.0, 1.0, 1.0], [3.0]], 1.4),
        ([[0.5] * 100, [0.3] * 900], 0.32),
    ],
)
def test_a01_token_mean_counts_tokens_not_micro_batches(
    values: list[list[float]], expected: float
) -> None:
    padded, mask, normalizer = _step(values)
    first = aggregate(padded[:1], mask[:1], "token-mean", normalizer)
    second = aggregate(padded[1:], mask[1:], "token-mean", normalizer)
    assert float((first + second).detach()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_a01_no_split_changes_loss_or_gradient(aggregation: LossAggregation) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.rand(n, generator=generator).tolist() for n in (5, 1, 3, 7, 2, 4)]
    whole, mask, normalizer = _step(rows)
    aggregate(whole, mask, aggregation, normalizer).backward()
    for split in ([6], [1] * 6, [2, 4], [3, 1, 2]):
        parts, _, _ = _step(rows)
        pieces = [
            aggregate(v, m, aggregation, normalizer)
            for v, m in zip(parts.split(split), mask.split(split), strict=True)
        ]
        sum(pieces).backward()
        torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-15)


def test_sequence_aggregations_by_hand() -> None:
    values, mask, normalizer = _step([[1.0, 2.0], [6.0], []])
    by_mean = aggregate(values, mask, "seq-mean-token-mean", normalizer)
    by_sum = aggregate(values, mask, "seq-mean-token-sum", normalizer)
    assert float(by_mean.detach()) == pytest.approx((1.5 + 6.0) / 2)
    assert float(by_sum.detach()) == pytest.approx((3.0 + 6.0) / 2)


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_a28_an_empty_mask_adds_zero_and_stays_in_the_graph(aggregation: LossAggregation) -> None:
    values = torch.full((2, 3), float("nan")).requires_grad_()
    share = aggregate(values, torch.zeros(2, 3), aggregation, Normalizer(tokens=4, sequences=1))
    share.backward()
    assert float(share.detach()) == 0.0
    assert torch.equal(values.grad, torch.zeros(2, 3))


def test_a36_sequences_that_stand_in_one_row_of_the_model_are_still_two() -> None:
    """2 tokens at 1.0 and 6 at 3.0: 2.0 by sequences (2.5 where they are taken for one)."""
    values, mask, normalizer = _step([[1.0] * 2, [3.0] * 6])
    by_sequence = aggregate(values, mask, "seq-mean-token-mean", normalizer)
    by_token = aggregate(values, mask, "token-mean", normalizer)
    assert float(by_sequence.detach()) == pytest.approx(2.0)
    assert float(by_token.detach()) == pytest.approx(2.5)
