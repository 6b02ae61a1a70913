import math

import pytest
import torch

from algorithms.advantages.whitening import moments, whiten


def test_the_sample_deviation_over_all_tokens_of_the_mask() -> None:
    """1, 2, 6: mean 3, sample variance (4 + 1 + 9) / 2 = 7."""
    values = torch.tensor([[1.0, 2.0, math.nan], [math.inf, 6.0, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert moments(values, mask) == (3.0, 7.0)
    by = math.sqrt(7.0)
    expected = torch.tensor([[-2 / by, -1 / by, 0.0], [0.0, 3 / by, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, mask), expected, rtol=1e-8, atol=0)


def test_what_is_whitened_has_mean_zero_and_deviation_one() -> None:
    draw = torch.Generator().manual_seed(2)
    values = 40.0 + 3.0 * torch.randn(8, 20, dtype=torch.float64, generator=draw)
    mask = (torch.rand(8, 20, generator=draw) < 0.5).float()
    mean, variance = moments(whiten(values, mask), mask)
    assert mean == pytest.approx(0.0, abs=1e-13)
    assert variance == pytest.approx(1.0, abs=1e-8)


def test_a03_a_single_token_and_equal_ones_are_zero_and_never_nan() -> None:
    alone = torch.tensor([[5.0, 0.0]])
    assert whiten(alone, torch.tensor([[1.0, 0.0]])).tolist() == [[0.0, 0.0]]
    equal = torch.full((2, 3), 0.1, dtype=torch.float64)
    assert float(whiten(equal, torch.ones(2, 3)).abs().max()) < 1e-9


def test_a28_nothing_to_whiten_is_zero() -> None:
    assert whiten(torch.full((1, 2), math.nan), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
