import math

import pytest
import torch
from torch import Tensor

from algorithms.advantages.gae import explained_variance, generalized_advantages
from tests.algorithms.reference_fixture import LENGTHS, REWARDS, reference_fixture


def _token_by_token(
    rewards: Tensor, values: Tensor, mask: Tensor, discount: float, gae_lambda: float
) -> Tensor:
    """The definition, row by row over the policy's tokens alone."""
    advantages = torch.zeros_like(values)
    for row in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[row, t]]
        following, later = 0.0, 0.0
        for t in reversed(places):
            error = float(rewards[row, t]) + discount * following - float(values[row, t])
            later = error + discount * gae_lambda * later
            following, advantages[row, t] = float(values[row, t]), later
    return advantages


def test_a25_values_of_masked_tokens_never_count() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    for masked in (100.0, math.nan, math.inf):
        values = torch.tensor([[0.0, 0.0, masked]])
        advantages, returns = generalized_advantages(
            rewards, values, mask, discount=1.0, gae_lambda=0.95
        )
        assert advantages.tolist() == [[0.95, 1.0, 0.0]]
        assert returns.tolist() == [[0.95, 1.0, 0.0]]


def test_a25_an_observation_between_two_turns_is_skipped() -> None:
    """Turn 1 earns 1, then two tokens of the environment, then turn 2 earns 2."""
    nan = math.nan
    rewards = torch.tensor([[nan, 1.0, nan, nan, 0.0, 2.0]])
    values = torch.tensor([[nan, 0.5, nan, 1e30, 0.25, 1.5]])
    mask = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 1.0]])
    advantages, returns = generalized_advantages(
        rewards, values, mask, discount=0.9, gae_lambda=0.8
    )
    last = 2.0 - 1.5
    middle = (0.9 * 1.5 - 0.25) + 0.72 * last
    first = (1.0 + 0.9 * 0.25 - 0.5) + 0.72 * middle
    expected = torch.tensor([[0.0, first, 0.0, 0.0, middle, last]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)
    kept = torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.25, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(returns, expected + kept, rtol=1e-12, atol=0)


def test_the_reference_fixture_gives_the_references_first_return() -> None:
    batch, _ = reference_fixture()
    rewards = torch.zeros(6, 6, dtype=torch.float64)
    rewards[torch.arange(6), torch.tensor(LENGTHS)] = torch.tensor(REWARDS, dtype=torch.float64)
    values, mask = batch.per_token["values"], batch.loss_mask
    advantages, returns = generalized_advantages(
        rewards, values, mask, discount=1.0, gae_lambda=0.95
    )
    assert float(returns[0, 1]) == pytest.approx(0.8707291, abs=6e-8)
    expected = _token_by_token(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-14)


def test_ragged_rows_with_gaps_against_the_definition() -> None:
    draw = torch.Generator().manual_seed(5)
    shape = (16, 33)
    rewards = torch.randn(shape, dtype=torch.float64, generator=draw)
    values = torch.randn(shape, dtype=torch.float64, generator=draw)
    mask = (torch.rand(shape, generator=draw) < 0.6).float()
    mask[3] = 0.0  # a row that was not scored
    mask[4], mask[4, 7] = 0.0, 1.0  # one token
    for discount, gae_lambda in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
        advantages, returns = generalized_advantages(
            rewards, values, mask, discount=discount, gae_lambda=gae_lambda
        )
        expected = _token_by_token(rewards, values, mask, discount, gae_lambda)
        torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returns, expected + values * mask, rtol=1e-12, atol=1e-12)


def test_lambda_one_is_the_return_less_the_value() -> None:
    rewards, values = torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[0.3, -0.2, 9.0]])
    advantages, _ = generalized_advantages(
        rewards, values, torch.ones(1, 3), discount=1.0, gae_lambda=1.0
    )
    expected = torch.tensor([[4.0, 3.0, 3.0]]).double() - values.double()
    torch.testing.assert_close(advantages, expected)


def test_explained_variance_by_hand() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])
    returns = torch.tensor([[math.nan, 0.0, 1.0, 2.0, 3.0]])
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    constant = torch.full((1, 5), 7.0)
    assert explained_variance(constant, returns, mask) == pytest.approx(0.0)
    half = returns * 0.5
    assert explained_variance(half, returns, mask) == pytest.approx(0.75)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(half, constant, mask) is None
    assert explained_variance(half, returns, torch.zeros(1, 5)) is None
