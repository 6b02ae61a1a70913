import pytest
import torch

from algorithms.algorithm import load_algorithm
from service.spec import CispoSpec
from tests.algorithms.reference_fixture import reference_fixture
from tests.algorithms.reference_loss import loss_of, value_and_gradient
from tests.algorithms.rollouts import rollout_of


@pytest.mark.parametrize(("clip_high", "expected"), [(4.0, 0.6494489), (0.2, 0.5736999)])
def test_values_that_trl_and_verl_agree_on(clip_high: float, expected: float) -> None:
    """TRL's bound is 1 + clip_high; verl's is clip_high."""
    value, _ = value_and_gradient(CispoSpec(clip_high=clip_high))
    assert value == pytest.approx(expected, abs=6e-8)


def test_every_token_keeps_a_gradient_and_a_bounded_weight() -> None:
    """d/d lp = -w A / N, also where w is at a bound."""
    batch, log_probs = reference_fixture()
    ratio = (log_probs.detach() - batch.per_token["old_log_probs"]).exp()
    spec = CispoSpec(clip_low=0.1, clip_high=0.2)
    _, gradient = value_and_gradient(spec)
    weight = ratio.clamp(0.9, 1.2)
    expected = -weight * batch.per_token["advantages"] * batch.loss_mask / 20
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    bounded = ((weight != ratio) * batch.loss_mask).sum()
    assert 0 < bounded < 20
    sums = loss_of(spec, batch, log_probs).sums
    assert sums["ratio_clip_fraction"] == (float(bounded), 20.0)


def test_a_lower_distance_of_one_sets_no_lower_bound() -> None:
    batch, _ = reference_fixture()
    old = batch.per_token["old_log_probs"] + 30.0  # ratios of about 1e-13
    value, gradient = value_and_gradient(CispoSpec(), old_log_probs=old)
    assert value == pytest.approx(0.0, abs=1e-8)
    assert float(gradient.abs().max()) < 1e-8


def test_a03_advantages_are_those_of_grpo() -> None:
    rollout = rollout_of([[1.0], [0.0]], group_size=2)
    credit = load_algorithm(CispoSpec(group_size=2)).advantages(rollout)
    assert credit.advantages[:, 1].tolist() == pytest.approx([0.707107, -0.707107], abs=2e-6)
    plain = CispoSpec(group_size=2, normalize_by_std=False)
    assert load_algorithm(plain).advantages(rollout).advantages[:, 1].tolist() == [0.5, -0.5]
