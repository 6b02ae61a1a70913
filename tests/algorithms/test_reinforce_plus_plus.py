import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from service.spec import ReinforcePlusPlusSpec
from tests.algorithms.reference_loss import value_and_gradient
from tests.algorithms.rollouts import rollout_of


def test_discounted_returns_whitened_over_all_tokens_of_the_batch() -> None:
    """Discount 0.5, rewards 4 and 1 at the end of 3 and 1 tokens: 1, 2, 4, 1."""
    rollout = rollout_of([[0.0, 0.0, 4.0], [1.0], None])
    credit = load_algorithm(ReinforcePlusPlusSpec(discount=0.5)).advantages(rollout)
    returns = [1.0, 2.0, 4.0, 1.0]
    mean = sum(returns) / 4
    deviation = math.sqrt(sum((x - mean) ** 2 for x in returns) / 3)
    whitened = [(x - mean) / deviation for x in returns]
    expected = [[0.0, *whitened[:3]], [0.0, whitened[3], 0.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(
        credit.advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=0
    )
    assert credit.returns is None
    assert credit.metrics == {}


def test_a07_the_kl_of_a_token_counts_for_it_and_those_before() -> None:
    """Weight 0.5, k1 of 0.2 and 0.6 nats, reward 1: 1 - 0.4 and 1 - 0.3."""
    rollout = rollout_of(
        [[0.0, 1.0], [0.0]],
        old_log_probs=[[-1.0, -1.0], [-1.0]],
        reference_log_probs=[[-1.2, -1.6], [-1.0]],
    )
    credit = load_algorithm(ReinforcePlusPlusSpec(kl_coef=0.5)).advantages(rollout)
    returns = torch.tensor([0.6, 0.7, 0.0], dtype=torch.float64)
    expected = (returns - returns.mean()) / returns.std()
    found = torch.cat([credit.advantages[0, 1:], credit.advantages[1, 1:2]])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)


def test_a06_a_group_baseline_is_the_mean_of_what_was_scored() -> None:
    """1 and 0 become 0.5 and -0.5, 5 and 3 become 1 and -1; then all are whitened together."""
    rollout = rollout_of([[1.0], None, [0.0], [5.0], [3.0], None], group_size=3)
    spec = ReinforcePlusPlusSpec(group_size=3, baseline="group")
    credit = load_algorithm(spec).advantages(rollout)
    centred = torch.tensor([0.5, -0.5, 1.0, -1.0], dtype=torch.float64)
    expected = centred / centred.std()
    found = credit.advantages[[0, 2, 3, 4], 1]
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)
    assert credit.advantages[[1, 5]].tolist() == [[0.0, 0.0]] * 2
    assert credit.metrics == {"groups_unscored": 0, "groups_flat_rate": 0.0}


def test_without_a_baseline_a_group_is_not_centred() -> None:
    rollout = rollout_of([[1.0], [0.0], [5.0], [3.0]], group_size=2)
    credit = load_algorithm(ReinforcePlusPlusSpec(group_size=2)).advantages(rollout)
    rewards = torch.tensor([1.0, 0.0, 5.0, 3.0], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / rewards.std()
    torch.testing.assert_close(credit.advantages[:, 1], expected, rtol=1e-7, atol=0)


def test_a30_the_baseline_goes_off_where_the_policy_ended() -> None:
    """Two turns with an observation between them; the reward to go of the first holds both."""
    rollout = rollout_of([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]], mask=[[1, 0, 1]] * 2, group_size=2)
    spec = ReinforcePlusPlusSpec(group_size=2, baseline="group")
    credit = load_algorithm(spec).advantages(rollout)
    to_go = torch.tensor([[1.5, 0.5], [-1.5, -1.5]], dtype=torch.float64)
    expected = (to_go - to_go.mean()) / to_go.std()
    torch.testing.assert_close(credit.advantages[:, [1, 3]], expected, rtol=1e-7, atol=0)
    assert credit.advantages[:, 2].tolist() == [0.0, 0.0]


def test_the_loss_is_ppos() -> None:
    value, gradient = value_and_gradient(ReinforcePlusPlusSpec())
    assert value == pytest.approx(-0.2100289, abs=6e-8)
    assert float(gradient.norm()) == pytest.approx(0.1996473, abs=6e-8)


def test_a_group_baseline_needs_a_group() -> None:
    with pytest.raises(ValueError, match="`group_size` must be at least 2"):
        ReinforcePlusPlusSpec(baseline="group")
