"""ORPO against the value that TRL and Liger agree on, and a gradient by hand in fp64."""

import math

import numpy as np
import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.orpo import Orpo
from service.spec import OrpoSpec
from tests.algorithms.answer_losses import answers, loss_of, means
from tests.algorithms.reference_fixture import pair_fixture


def test_the_odds_term_of_trl_and_liger() -> None:
    """Both at their lambda of 0.1; the likelihood term beside it is taken off here."""
    batch, log_probs = pair_fixture()
    output = loss_of(OrpoSpec(beta=0.1), batch, log_probs)
    odds_term = float(output.loss.detach()) - means(output)["nll"]
    assert odds_term == pytest.approx(0.0981402, abs=1e-7)
    assert means(output)["odds_ratio_loss"] == pytest.approx(0.981402, abs=6e-7)


def test_loss_and_gradient_are_those_derived_by_hand() -> None:
    """With p the mean token's probability, d log odds / d mean = 1 / (1 - p), so of a pair

    dL/dc = -1 - beta s / (1 - p_c),  dL/dr = beta s / (1 - p_r),  s = sigmoid(-log odds ratio)
    """
    batch, log_probs = pair_fixture()
    output = loss_of(OrpoSpec(beta=0.4), batch, log_probs)
    output.loss.backward()
    new, mask = log_probs.detach().numpy(), batch.loss_mask.double().numpy()
    expected, loss = np.zeros((6, 6)), 0.0
    for chosen, rejected in ((0, 1), (2, 3), (4, 5)):
        mean = [float((new[r] * mask[r]).sum() / mask[r].sum()) for r in (chosen, rejected)]
        p = [math.exp(m) for m in mean]
        ratio = math.log(p[0] / (1 - p[0])) - math.log(p[1] / (1 - p[1]))
        s = 1 / (1 + math.exp(ratio))
        loss += (-mean[0] - 0.4 * math.log(1 - s)) / 3
        slopes = (-1 - 0.4 * s / (1 - p[0]), 0.4 * s / (1 - p[1]))
        for row, slope in zip((chosen, rejected), slopes, strict=True):
            expected[row] = slope / 3 * mask[row] / mask[row].sum()
    assert float(output.loss.detach()) == pytest.approx(loss, abs=1e-7)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected), rtol=1e-12, atol=1e-15)


def test_a36_the_likelihood_is_a_mean_of_answers_not_of_tokens() -> None:
    """2 tokens at 1.0 and 6 at 3.0: 2.0, and not 2.5, which is the mean of the 8 tokens."""
    batch, policy = answers([-1.0] * 2, [-1.0], [-3.0] * 6, [-3.0], unit=2)
    assert means(loss_of(OrpoSpec(), batch, policy))["nll"] == pytest.approx(2.0, abs=1e-12)
    without_odds = loss_of(OrpoSpec(beta=1e-9), batch, policy).loss
    assert float(without_odds.detach()) == pytest.approx(2.0, abs=1e-8)


def test_metrics_of_a_pair_worked_out_by_hand() -> None:
    """p = 3/4 against p = 1/2: odds 3 and 1."""
    batch, policy = answers([math.log(0.75)] * 3, [math.log(0.5)], unit=2)
    chosen, rejected = math.log(0.75), math.log(0.5)
    assert means(loss_of(OrpoSpec(beta=0.1), batch, policy)) == pytest.approx(
        {
            "reward_chosen": 0.1 * chosen,
            "reward_rejected": 0.1 * rejected,
            "reward_margin": 0.1 * (chosen - rejected),
            "reward_accuracy": 1.0,
            "pairs_left_out": 0.0,
            "log_odds_ratio": math.log(3.0),
            "odds_ratio_loss": math.log(4 / 3),
            "log_prob_chosen": chosen,
            "log_prob_rejected": rejected,
            "nll": -chosen,
            "entropy": 1.0,
        }
    )


def test_answers_that_the_model_is_certain_of_do_not_break_it() -> None:
    """Log-probs of exactly 0 are common once a small model knows an answer."""
    batch, policy = answers([0.0, 0.0], [0.0], unit=2)
    output = loss_of(OrpoSpec(beta=0.1), batch, policy)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(0.1 * math.log(2.0), abs=1e-12)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    expected[0, 1:], expected[1, 1] = (-1 - 0.05) / 2, 0.05
    torch.testing.assert_close(policy.grad, expected, rtol=1e-12, atol=0)


def test_the_spec_names_this_class_and_needs_no_reference() -> None:
    assert isinstance(load_algorithm(OrpoSpec()), Orpo)
    assert not OrpoSpec().keeps_reference
