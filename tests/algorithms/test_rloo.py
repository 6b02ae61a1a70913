import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from service.spec import RlooSpec
from tests.algorithms.reference_fixture import ADVANTAGES, LENGTHS, REWARDS, reference_fixture
from tests.algorithms.reference_loss import loss_of, value_and_gradient
from tests.algorithms.rollouts import rollout_of


def test_advantages_that_the_references_agree_on() -> None:
    rollout = rollout_of([[reward] for reward in REWARDS], group_size=3)
    credit = load_algorithm(RlooSpec(group_size=3)).advantages(rollout)
    expected = [0.75, -0.75, 0.0, 1.5, 1.5, -3.0]
    assert credit.advantages[:, 1].tolist() == pytest.approx(expected)


def test_a06_an_unscored_answer_is_left_out_and_is_not_zero() -> None:
    rollout = rollout_of([[1.0], None, [0.0]], group_size=3)
    credit = load_algorithm(RlooSpec(group_size=3)).advantages(rollout)
    assert credit.advantages[:, 1].tolist() == [1.0, 0.0, -1.0]


def test_the_kl_of_an_answer_is_off_its_reward_before_the_baseline() -> None:
    """Rewards 1 and 0, KLs of 0.5 and 0.1 nats (k1, summed over tokens), weight 0.5."""
    rollout = rollout_of(
        [[0.0, 1.0], [0.0]],
        group_size=2,
        old_log_probs=[[-1.0, -1.0], [-1.0]],
        reference_log_probs=[[-1.2, -1.3], [-1.1]],
    )
    credit = load_algorithm(RlooSpec(group_size=2, kl_coef=0.5)).advantages(rollout)
    better, worse = 1.0 - 0.25, 0.0 - 0.05
    assert credit.advantages[:, 1].tolist() == pytest.approx([better - worse, worse - better])
    assert credit.metrics["reward_kl"] == pytest.approx(0.3)


def test_one_ratio_an_answer_against_a_loop_over_answers() -> None:
    """loss = mean over answers of -min(r A, clip(r) A), r = exp(sum of log-ratios)."""
    batch, log_probs = reference_fixture()
    difference = log_probs.detach() - batch.per_token["old_log_probs"]
    losses, expected, bounded = [], torch.zeros(6, 6, dtype=torch.float64), 0
    for row, (length, advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        ratio = math.exp(float(difference[row, 1 : 1 + length].sum()))
        free, clipped = -ratio * advantage, -min(max(ratio, 0.95), 1.05) * advantage
        losses.append(max(free, clipped))
        if free >= clipped:
            expected[row, 1 : 1 + length] = free / 6
        else:
            bounded += length
    spec = RlooSpec(clip_low=0.05, clip_high=0.05)
    value, gradient = value_and_gradient(spec)
    assert value == pytest.approx(math.fsum(losses) / 6, abs=1e-13)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    sums = loss_of(spec, batch, log_probs).sums
    assert sums["ratio_clip_fraction"] == (float(bounded), 20.0)
    assert 0 < bounded < 20


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token-mean", -0.2100289), ("seq-mean-token-sum", -0.7000964)]
)
def test_a_ratio_for_each_token_is_ppos_loss(aggregation: str, expected: float) -> None:
    spec = RlooSpec.model_validate({"ratio": "token", "loss_aggregation": aggregation})
    assert value_and_gradient(spec)[0] == pytest.approx(expected, abs=6e-8)


def test_a17_a_long_answer_has_one_loss_as_a_short_one_has() -> None:
    """With ratio 1, advantages 1 (5 tokens) and -1 (1 token) cancel out."""
    batch, log_probs = reference_fixture()
    rows = torch.tensor([0, 5])
    chosen = batch.rows(rows).with_per_token(
        advantages=torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 6),
        old_log_probs=log_probs.detach()[rows],
    )
    assert float(loss_of(RlooSpec(), chosen, log_probs[rows]).loss.detach()) == 0.0


def test_an_answer_has_one_loss_only_where_losses_are_summed() -> None:
    with pytest.raises(ValueError, match="must be seq-mean-token-sum with ratio sequence"):
        RlooSpec(loss_aggregation="token-mean")
