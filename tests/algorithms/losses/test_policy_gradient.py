import math

import pytest
import torch

from algorithms.losses.policy_gradient import clipped_loss, weighted_log_prob_loss


def _log(ratio: float) -> torch.Tensor:
    return torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (1.5, 2.0, -2.4, 0.0),  # above it, and good: bounded
        (0.5, 2.0, -1.0, -1.0),  # below it, and good: free, so that it comes back
        (0.5, -2.0, 1.6, 0.0),  # below it, and bad: bounded
        (1.5, -2.0, 3.0, 3.0),  # above it, and bad: free
    ],
)
def test_each_branch_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    log_ratio = _log(ratio)
    result = clipped_loss(log_ratio, torch.tensor([[advantage]]), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert float(result.loss.detach()) == pytest.approx(loss)
    assert float(log_ratio.grad) == pytest.approx(gradient)
    assert float(result.clipped) == (gradient == 0.0)
    assert float(result.ratio) == pytest.approx(ratio)


def test_a_higher_upper_bound_lets_good_tokens_further() -> None:
    log_ratio = _log(1.25)
    result = clipped_loss(log_ratio, torch.ones(1, 1), clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert float(log_ratio.grad) == pytest.approx(-1.25)


@pytest.mark.parametrize(("ratio", "loss", "gradient"), [(2.5, 2.5, 2.5), (9.0, 3.0, 0.0)])
def test_dual_clip_bounds_the_ratio_of_what_was_bad(
    ratio: float, loss: float, gradient: float
) -> None:
    log_ratio = _log(ratio)
    result = clipped_loss(log_ratio, -torch.ones(1, 1), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result.loss.sum().backward()
    assert float(result.loss.detach()) == pytest.approx(loss)
    assert float(log_ratio.grad) == pytest.approx(gradient)
    assert float(result.clipped) == (gradient == 0.0)
    free = clipped_loss(_log(ratio), torch.ones(1, 1), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert float(free.loss.detach()) == pytest.approx(-1.2)  # good ones are as they were


@pytest.mark.parametrize("distance", [50.0, -50.0, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_log_ratios_stay_finite(distance: float, advantage: float) -> None:
    log_ratio = torch.tensor([[distance]], dtype=torch.float32, requires_grad=True)
    result = clipped_loss(log_ratio, torch.tensor([[advantage]]), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(log_ratio.grad).all()
    log_probs = log_ratio.detach().clone().requires_grad_()
    weighted = weighted_log_prob_loss(
        log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), low=0.0, high=5.0
    )
    weighted.loss.sum().backward()
    assert torch.isfinite(weighted.loss).all()
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize(("ratio", "weight", "clipped"), [(0.5, 0.8, 1), (1.1, 1.1, 0), (9, 5, 1)])
def test_a_bounded_weight_keeps_the_gradient(ratio: float, weight: float, clipped: int) -> None:
    old = torch.tensor([[-2.0]], dtype=torch.float64)
    log_probs = (old + math.log(ratio)).requires_grad_()
    result = weighted_log_prob_loss(log_probs, old, torch.tensor([[-3.0]]), low=0.8, high=5.0)
    result.loss.sum().backward()
    assert float(result.loss.detach()) == pytest.approx(weight * 3.0 * (-2.0 + math.log(ratio)))
    assert float(log_probs.grad) == pytest.approx(weight * 3.0)
    assert float(result.clipped) == clipped
