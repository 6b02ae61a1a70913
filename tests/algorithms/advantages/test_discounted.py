import math

import pytest
import torch

from algorithms.advantages.discounted import discounted_returns, of_next, suffix_sums


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 64, 100])
def test_the_recurrence_token_by_token(length: int) -> None:
    draw = torch.Generator().manual_seed(length)
    values = torch.randn(4, length, dtype=torch.float64, generator=draw)
    factors = torch.rand(4, length, dtype=torch.float64, generator=draw)
    expected, later = torch.zeros_like(values), torch.zeros(4, dtype=torch.float64)
    for t in reversed(range(length)):
        later = values[:, t] + factors[:, t] * later
        expected[:, t] = later
    torch.testing.assert_close(suffix_sums(values, factors), expected, rtol=1e-13, atol=1e-13)


def test_returns_by_hand() -> None:
    """Discount 0.5: 2; 1 + 0.5 * 2; 0 + 0.5 * 2."""
    rewards = torch.tensor([[0.0, 1.0, 2.0]])
    assert discounted_returns(rewards, torch.ones(1, 3), 0.5).tolist() == [[1.0, 2.0, 2.0]]


def test_what_the_environment_said_takes_no_step() -> None:
    nan = math.nan
    rewards = torch.tensor([[nan, 0.0, 1.0, nan, nan, 2.0, nan]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]])
    expected = [[0.0, 0.5 * (1.0 + 0.5 * 2.0), 1.0 + 0.5 * 2.0, 0.0, 0.0, 2.0, 0.0]]
    assert discounted_returns(rewards, mask, 0.5).tolist() == expected


def test_of_next_is_exact_and_skips_what_is_masked() -> None:
    values = torch.tensor([[math.nan, 0.1, math.nan, math.inf, 0.3, 1e300]], dtype=torch.float64)
    mask = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]])
    assert of_next(values, mask).tolist() == [[0.1, 0.3, 0.3, 0.3, 0.0, 0.0]]
