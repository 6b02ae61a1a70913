"""One optimizer step: how it is cut, what is not finite, number formats; rows in their order."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.batch import Batch
from algorithms.protocols import StepResult
from megatron_backend.training.shares import gather_rows, merge_step
from service.spec import AlgorithmSpec, GrpoSpec, SftSpec
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.training_runs import (
    log_probs,
    random_batch,
    train,
    train_fp16,
)

ALGORITHMS: dict[str, AlgorithmSpec] = {
    "sft": SftSpec(),
    "grpo": GrpoSpec(kl_coef=0.1, updates_per_rollout=2),
}
LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(dp=2)]


def steps(
    ranks: Ranks,
    name: str,
    layout: Layout,
    algorithm: AlgorithmSpec,
    batches: list[Batch],
    **options: Any,
) -> list[StepResult]:
    """The merged result of each step."""
    shares = ranks.run(layout, train, name, layout, algorithm, batches, options)
    return [merge_step(layout, step) for step in zip(*shares, strict=True)]


def assert_same(actual: list[StepResult], expected: list[StepResult]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.finite
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-7)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)
        assert dict(one.metrics) == pytest.approx(dict(other.metrics), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_split_into_micro_batches_changes_nothing_a01(
    ranks: Ranks, size: int, algorithm: str
) -> None:
    batches = [random_batch(seed=seed) for seed in range(2)]
    spec = ALGORITHMS[algorithm]
    expected = steps(ranks, "qwen2", Layout(), spec, batches)
    assert_same(steps(ranks, "qwen2", Layout(), spec, batches, micro_batch_size=size), expected)


def without_answers(batch: Batch, rows: list[int]) -> Batch:
    """The batch with nothing to train in these rows."""
    mask = batch.loss_mask.clone()
    mask[rows] = 0
    return dataclasses.replace(batch, loss_mask=mask)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(pp=2)], ids=str)
def test_micro_batches_and_ranks_without_trained_tokens_add_nothing_a28(
    ranks: Ranks, layout: Layout, algorithm: str
) -> None:
    """Rows 0 to 2 are the first of two data-parallel ranks', and half of the micro-batches."""
    whole = random_batch()
    spec = ALGORITHMS[algorithm]
    batch = without_answers(whole, [0, 1, 2])
    expected = steps(ranks, "qwen2-tied", Layout(), spec, [whole.rows(slice(3, 6))])
    actual = steps(ranks, "qwen2-tied", layout, spec, [batch], micro_batch_size=1)
    assert_same(actual, expected)
    nothing = steps(ranks, "qwen2-tied", layout, spec, [without_answers(whole, [*range(6)])])
    assert nothing[0].loss == 0
    assert nothing[0].gradient_norm == 0
    assert nothing[0].finite


def test_a_rank_without_rows_takes_part(ranks: Ranks) -> None:
    batch = random_batch(rows=1)
    expected = steps(ranks, "qwen2-tied", Layout(), SftSpec(), [batch, batch])
    assert_same(steps(ranks, "qwen2-tied", Layout(dp=2), SftSpec(), [batch, batch]), expected)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp=2)], ids=str)
def test_a_step_that_is_not_finite_is_not_taken(ranks: Ranks, layout: Layout) -> None:
    """The third step equals the one that follows the first directly."""
    good, spec = random_batch(), ALGORITHMS["grpo"]
    bad = good.with_per_token(advantages=torch.full_like(good.loss_mask, torch.inf))
    first, skipped, third = steps(ranks, "qwen2-tied", layout, spec, [good, bad, good])
    assert first.finite
    assert not skipped.finite
    _, second = steps(ranks, "qwen2-tied", layout, spec, [good, good])
    assert third == second


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)], ids=str)
def test_bfloat16_trains_with_fp32_optimizer_state(ranks: Ranks, layout: Layout) -> None:
    batches = [random_batch(seed=1)] * 4
    results = steps(ranks, "qwen2-tied", layout, SftSpec(), batches, dtype=torch.bfloat16)
    exact = steps(ranks, "qwen2-tied", Layout(), SftSpec(), batches)
    for result, expected in zip(results, exact, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=2e-2)
    assert results[-1].loss < results[0].loss


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, ep=2)], ids=str)
def test_an_overflow_of_float16_is_tried_again_at_a_smaller_loss_scale(
    ranks: Ranks, layout: Layout
) -> None:
    """Experts have an optimizer of their own; its scale goes down with the other's."""
    batches = [random_batch(seed=seed) for seed in range(2)]
    (calm, calm_scale), *_ = ranks.run(layout, train_fp16, layout, 2.0**6, batches)
    (retried, scale), *_ = ranks.run(layout, train_fp16, layout, 2.0**36, batches)
    assert calm_scale == 2.0**6
    assert 2.0**6 < scale < 2.0**36
    exact = steps(ranks, "qwen3_moe", Layout(), SftSpec(), batches)
    for one, other, expected in zip(calm, retried, exact, strict=True):
        assert one.finite
        assert other.finite
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=2e-2)
        assert one.loss == pytest.approx(expected.loss, rel=1e-2)


FOUR_LAYERS = {"num_hidden_layers": 4}
WAYS = [
    FOUR_LAYERS,
    FOUR_LAYERS | {"micro_batch_size": 2},
    FOUR_LAYERS | {"micro_batch_size": 2, "packing": False},
]


@pytest.fixture(scope="module")
def row_by_row(ranks: Ranks) -> Tensor:
    """Log-probs of each row of `random_batch` alone, in one process."""
    batch = random_batch()
    rows = [batch.rows(slice(index, index + 1)) for index in range(len(batch))]
    ((answers,),) = ranks.run(Layout(), log_probs, "qwen2", Layout(), rows, [FOUR_LAYERS])
    return torch.cat([gather_rows(Layout(), [answer]) for answer in answers])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        *LAYOUTS,
        Layout(tp=2, sequence_parallel=True),
        Layout(pp=2, vpp=2),
        Layout(cp=2),
    ],
    ids=str,
)
def test_log_probs_come_back_whole_and_in_order(
    ranks: Ranks, row_by_row: Tensor, layout: Layout
) -> None:
    batch = random_batch()
    answers = ranks.run(layout, log_probs, "qwen2", layout, [batch], WAYS)
    for way in range(len(WAYS)):
        actual = gather_rows(layout, [answer[way][0] for answer in answers])
        torch.testing.assert_close(actual, row_by_row, rtol=1e-5, atol=1e-5)
        assert not actual[batch.loss_mask == 0].any()
        assert actual[batch.loss_mask > 0].all()
