"""SimPO against the value that TRL and Liger agree on, and a gradient by hand in fp64."""

import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.simpo import Simpo
from service.spec import SimpoSpec
from tests.algorithms.answer_losses import answers, loss_of, means
from tests.algorithms.reference_fixture import pair_fixture


def test_the_value_of_trl_and_liger() -> None:
    batch, log_probs = pair_fixture()
    output = loss_of(SimpoSpec(beta=2.0, gamma=0.5), batch, log_probs)
    assert float(output.loss.detach()) == pytest.approx(1.4819097, abs=6e-8)


def test_gamma_is_absolute_and_means_not_sums_are_compared() -> None:
    """Chosen -1 a token over 4 tokens, rejected -1.5 over 2: beta d = 1, less gamma 0.5. By sums
    the rejected answer would be far ahead."""
    batch, policy = answers([-1.0] * 4, [-1.5] * 2, unit=2)
    output = loss_of(SimpoSpec(beta=2.0, gamma=0.5), batch, policy)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(math.log1p(math.exp(-0.5)), abs=1e-12)
    slope = -2.0 / (1.0 + math.exp(0.5))
    expected = torch.zeros(2, 5, dtype=torch.float64)
    expected[0, 1:], expected[1, 1:3] = slope / 4, -slope / 2
    torch.testing.assert_close(policy.grad, expected, rtol=1e-12, atol=0)
    assert means(output) == pytest.approx(
        {
            "reward_chosen": -2.0,
            "reward_rejected": -3.0,
            "reward_margin": 1.0,
            "reward_accuracy": 1.0,
            "pairs_left_out": 0.0,
            "log_prob_chosen": -1.0,
            "log_prob_rejected": -1.5,
            "nll": 1.0,
            "entropy": 1.0,
        }
    )


def test_the_likelihood_term_is_a_mean_over_tokens_then_over_pairs() -> None:
    batch, policy = answers([-1.0, -1.0], [-2.0], [-3.0] * 6, [-1.0, -4.0], unit=2)
    plain = loss_of(SimpoSpec(), batch, policy).loss
    with_nll = loss_of(SimpoSpec(nll_coef=0.5), batch, policy).loss
    assert float((with_nll - plain).detach()) == pytest.approx(0.5 * 2.0, abs=1e-12)


def test_the_spec_names_this_class_and_needs_no_reference() -> None:
    assert isinstance(load_algorithm(SimpoSpec()), Simpo)
    assert not SimpoSpec().keeps_reference
    batch, policy = answers([-1.0], [-2.0], unit=2)
    loss_of(SimpoSpec(), batch.with_per_token(reference_log_probs=torch.empty(0)), policy)
