"""Losses on pairs and on answers: limits, gradients by hand in fp64, and what they are made for."""

import math

import pytest
import torch
from torch import Tensor

from algorithms.losses.preference import (
    SMALLEST_REST,
    bradley_terry_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    odds_ratio_loss,
    robust_loss,
    sequence_log_probs,
    sigmoid_loss,
    simpo_loss,
)


def _leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def _gradient(losses: Tensor, leaf: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return gradient.tolist()


def test_a_row_is_a_sum_or_a_mean_of_its_trained_tokens_only() -> None:
    log_probs = torch.tensor([[math.nan, -1.0, -2.0, -4.0], [0.0, -3.0, math.inf, math.nan]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    assert sequence_log_probs(log_probs, mask).tolist() == [-7.0, -3.0]
    assert sequence_log_probs(log_probs, mask, mean=True).tolist() == [-7.0 / 3.0, -3.0]
    nothing = sequence_log_probs(log_probs, torch.zeros(2, 4), mean=True)
    assert nothing.tolist() == [0.0, 0.0]


def test_a_long_answer_is_summed_in_float64() -> None:
    """In float32 a token of 1e-4 is lost beside 4000: its last place there is 2.4e-4."""
    log_probs = torch.full((1, 4002), -1.0)
    log_probs[0, 0] = 0.0
    log_probs[0, -1] = -1e-4
    total = sequence_log_probs(log_probs, torch.ones(1, 4002))
    assert float(total) == pytest.approx(-4000.0001, abs=1e-9)


def test_sigmoid_and_its_smoothing_have_the_slopes_of_the_paper() -> None:
    margins = _leaf(-2.0, 0.0, 0.7, 3.0)
    for smoothing in (0.0, 0.1, 0.4):
        losses = sigmoid_loss(margins, label_smoothing=smoothing)
        for loss, m in zip(losses.tolist(), margins.tolist(), strict=True):
            p = _sigmoid(m)
            expected = -(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p)
            assert loss == pytest.approx(expected, abs=1e-12)
        slopes = [_sigmoid(m) - (1 - smoothing) for m in margins.tolist()]
        assert _gradient(losses, margins) == pytest.approx(slopes, abs=1e-12)


def test_the_robust_loss_of_flipped_labels_is_on_average_that_of_true_ones() -> None:
    """What it is made for: (1 - e) L(m) + e L(-m) = -log sigmoid(m), for every m."""
    margins = _leaf(-3.0, -0.2, 0.0, 1.5)
    for rate in (0.1, 0.45):
        seen = (1 - rate) * robust_loss(margins, label_smoothing=rate)
        seen = seen + rate * robust_loss(-margins, label_smoothing=rate)
        torch.testing.assert_close(seen, sigmoid_loss(margins), rtol=0, atol=1e-12)


def test_hinge_is_flat_beyond_a_margin_of_one() -> None:
    margins = _leaf(-1.0, 0.25, 2.0)
    losses = hinge_loss(margins)
    assert losses.tolist() == [2.0, 0.75, 0.0]
    assert _gradient(losses, margins) == [-1.0, -1.0, 0.0]


def test_ipo_is_least_at_half_of_one_over_beta() -> None:
    differences = _leaf(5.0, 0.0, 7.0)
    losses = ipo_loss(differences, beta=0.1)
    assert losses.tolist() == pytest.approx([0.0, 25.0, 4.0], abs=1e-12)
    assert _gradient(losses, differences) == pytest.approx([0.0, -10.0, 4.0], abs=1e-12)


def test_simpo_takes_gamma_off_the_scaled_difference() -> None:
    differences = _leaf(0.25, -0.5)
    losses = simpo_loss(differences, beta=2.0, gamma=0.5)
    expected = [math.log(2.0), -math.log(_sigmoid(-1.5))]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    slopes = [-2.0 * 0.5, -2.0 * _sigmoid(1.5)]
    assert _gradient(losses, differences) == pytest.approx(slopes, abs=1e-12)


def test_odds_are_those_of_the_mean_token() -> None:
    means = _leaf(math.log(0.75), math.log(0.5), math.log(1e-4))
    odds = log_odds(means)
    assert odds.tolist() == pytest.approx([math.log(3.0), 0.0, math.log(1e-4 / 0.9999)], abs=1e-12)
    assert _gradient(odds, means) == pytest.approx([4.0, 2.0, 1 / 0.9999], rel=1e-9)
    ratios = _leaf(math.log(3.0), -1.0)
    losses = odds_ratio_loss(ratios)
    assert losses.tolist() == pytest.approx([math.log(4 / 3), math.log1p(math.e)], abs=1e-12)
    assert _gradient(losses, ratios) == pytest.approx([-0.25, -_sigmoid(1.0)], abs=1e-12)


def test_odds_of_an_answer_that_is_certain_are_bounded() -> None:
    means = _leaf(0.0, -1e-12)
    odds = log_odds(means)
    assert odds.tolist() == pytest.approx([-math.log(SMALLEST_REST)] * 2, abs=1e-9)
    assert _gradient(odds, means) == [1.0, 1.0]


def test_bradley_terry_with_margin_and_centring() -> None:
    chosen, rejected = _leaf(1.0, 0.2), _leaf(-0.5, 0.9)
    margins = torch.tensor([1.0, 0.0], dtype=torch.float64)
    losses = bradley_terry_loss(chosen, rejected, margins=margins, center_coef=0.1)
    expected = [-math.log(_sigmoid(0.5)) + 0.1 * 0.25, -math.log(_sigmoid(-0.7)) + 0.1 * 1.21]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    of_chosen = [-_sigmoid(-0.5) + 0.2 * 0.5, -_sigmoid(0.7) + 0.2 * 1.1]
    assert _gradient(losses, chosen) == pytest.approx(of_chosen, abs=1e-12)
    losses = bradley_terry_loss(chosen, rejected, margins=margins, center_coef=0.1)
    of_rejected = [_sigmoid(-0.5) + 0.2 * 0.5, _sigmoid(0.7) + 0.2 * 1.1]
    assert _gradient(losses, rejected) == pytest.approx(of_rejected, abs=1e-12)


def test_a_constant_on_all_scores_counts_only_where_they_are_centred() -> None:
    chosen, rejected = _leaf(1.0), _leaf(0.5)
    plain = bradley_terry_loss(chosen, rejected)
    moved = bradley_terry_loss(chosen + 7, rejected + 7)
    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-12)
    centred = bradley_terry_loss(chosen + 7, rejected + 7, center_coef=0.1)
    torch.testing.assert_close(centred, plain + 0.1 * 15.5**2, rtol=0, atol=1e-12)


def test_kto_values_good_answers_above_the_point_and_bad_ones_below() -> None:
    rewards, point = _leaf(0.4, 0.4), torch.full((2,), 0.1, dtype=torch.float64)
    labels = torch.tensor([1.0, 0.0])
    losses = kto_loss(rewards, point, labels, desirable_weight=2.0, undesirable_weight=3.0)
    good, bad = _sigmoid(0.3), _sigmoid(-0.3)
    assert losses.tolist() == pytest.approx([2.0 * (1 - good), 3.0 * (1 - bad)], abs=1e-12)
    slopes = [-2.0 * good * (1 - good), 3.0 * bad * (1 - bad)]
    assert _gradient(losses, rewards) == pytest.approx(slopes, abs=1e-12)


def test_the_reference_point_has_no_gradient() -> None:
    rewards, point = _leaf(0.4), _leaf(0.1)
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    kto_loss(rewards, point, torch.ones(1), **weights).sum().backward()
    assert point.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_differences_are_finite_and_have_the_right_limits(dtype: torch.dtype) -> None:
    far = torch.tensor([-1e4, 1e4], dtype=dtype, requires_grad=True)
    smoothed = {"label_smoothing": 0.1}
    cases = {
        "sigmoid": (sigmoid_loss(far), [1e4, 0.0], [-1.0, 0.0]),
        "cdpo": (sigmoid_loss(far, **smoothed), [9e3, 1e3], [-0.9, 0.1]),
        "robust": (robust_loss(far, **smoothed), [9e3 / 0.8, -1e3 / 0.8], [-1.125, -0.125]),
        "hinge": (hinge_loss(far), [10001.0, 0.0], [-1.0, 0.0]),
        "ipo": (ipo_loss(far, beta=0.1), [10005.0**2, 9995.0**2], [-20010.0, 19990.0]),
        "simpo": (simpo_loss(far, beta=2.0, gamma=0.5), [20000.5, 0.0], [-2.0, 0.0]),
        "odds": (odds_ratio_loss(far), [1e4, 0.0], [-1.0, 0.0]),
        "scores": (bradley_terry_loss(far, torch.zeros_like(far)), [1e4, 0.0], [-1.0, 0.0]),
    }
    for label, limits in ((1.0, [1.0, 0.0]), (0.0, [0.0, 1.0])):
        cases[f"kto {label}"] = (
            kto_loss(
                far,
                torch.zeros_like(far),
                torch.full_like(far, label),
                desirable_weight=1.0,
                undesirable_weight=1.0,
            ),
            limits,
            [0.0, 0.0],
        )
    for name, (losses, limits, slopes) in cases.items():
        assert losses.tolist() == pytest.approx(limits, rel=1e-6), name
        assert _gradient(losses, far) == pytest.approx(slopes, rel=1e-6), name
    certain = log_odds(torch.tensor([-1e4, 0.0], dtype=dtype))
    assert certain.tolist() == pytest.approx([-1e4, 16.118096], rel=1e-6)
