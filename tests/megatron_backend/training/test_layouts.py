"""The layout does not change the maths: every layout against one process."""

from typing import Any

import pytest

from algorithms.batch import Batch, MetricSums
from algorithms.protocols import StepResult
from megatron_backend.layout import Layout
from megatron_backend.training.shares import merge_step
from service.spec import AlgorithmSpec, GrpoSpec, SftSpec
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.training_runs import random_batch, train

ALGORITHMS: dict[str, AlgorithmSpec] = {
    "sft": SftSpec(),
    "grpo": GrpoSpec(kl_coef=0.1, updates_per_rollout=2),
}
LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(dp=2)]
STEPS = 5


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
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_gradients_equal_those_of_one_process(
    ranks: Ranks, layout: Layout, algorithm: str
) -> None:
    batches = [random_batch(seed=seed) for seed in range(STEPS)]
    spec = ALGORITHMS[algorithm]
    expected = steps(ranks, "qwen2-tied", Layout(), spec, batches)
    assert expected[0].loss != expected[-1].loss
    actual = steps(ranks, "qwen2-tied", layout, spec, batches, micro_batch_size=2)
    assert_same(actual, expected)
