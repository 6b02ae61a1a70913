import math

import pytest
import torch

from algorithms.losses.sequence_ratio import (
    mean_log_ratio,
    sequence_log_ratio,
    share_of_each_token,
    with_token_gradients,
)


def test_a17_padding_never_leaks_into_a_sequence_ratio() -> None:
    new = torch.tensor([[0.0, 0.2, 0.4, 5.0]], dtype=torch.float64)
    old, mask = torch.zeros(1, 4), torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    assert float(mean_log_ratio(new, old, mask).exp()) == pytest.approx(1.349859, abs=1e-6)
    assert float(sequence_log_ratio(new, old, mask).exp()) == pytest.approx(1.822119, abs=1e-6)


def test_a_row_with_nothing_to_train_has_ratio_one() -> None:
    new = torch.tensor([[math.nan, math.inf]], requires_grad=True)
    ratio = mean_log_ratio(new, torch.zeros(1, 2), torch.zeros(1, 2)).exp()
    ratio.sum().backward()
    assert ratio.tolist() == [[1.0]]
    assert new.grad.tolist() == [[0.0, 0.0]]


def test_gradients_of_a_geometric_mean_are_spread_over_its_tokens() -> None:
    new = torch.tensor([[0.2, 0.4, 0.9]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    mean_log_ratio(new, torch.zeros(1, 3), mask).exp().sum().backward()
    expected = torch.tensor([[math.exp(0.3) / 2, math.exp(0.3) / 2, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(new.grad, expected, rtol=1e-12, atol=0)


def test_the_sequence_ratio_as_a_value_and_each_tokens_own_gradient() -> None:
    new = torch.tensor([[0.2, 0.4]], dtype=torch.float64, requires_grad=True)
    log_ratio = mean_log_ratio(new, torch.zeros(1, 2), torch.ones(1, 2))
    tokens = with_token_gradients(log_ratio, new)
    assert tokens.detach().tolist() == [[log_ratio.item(), log_ratio.item()]]
    (tokens * torch.tensor([[1.0, 10.0]])).sum().backward()
    assert new.grad.tolist() == [[1.0, 10.0]]


def test_shares_add_up_to_the_one_loss_of_a_sequence() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    shares = share_of_each_token(torch.tensor([[3.0], [math.nan]]), mask)
    assert shares.tolist() == [[1.5, 1.5, 0.0], [0.0, 0.0, 0.0]]
