"""DPO and its relatives against values of the references, and gradients by hand in fp64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.dpo import Dpo
from service.spec import DpoSpec
from tests.algorithms.answer_losses import answers, loss_of, means
from tests.algorithms.reference_fixture import pair_fixture


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({}, 0.6677187),
        ({"label_smoothing": 0.1}, 0.6730914),
        ({"loss": "robust", "label_smoothing": 0.1}, 0.6610028),
    ],
)
def test_values_of_the_references(fields: dict[str, object], value: float) -> None:
    batch, log_probs = pair_fixture()
    loss = loss_of(DpoSpec(**fields), batch, log_probs).loss
    assert float(loss.detach()) == pytest.approx(value, abs=6e-8)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


SLOPES: dict[str, tuple[DpoSpec, Callable[[float], float], Callable[[float], float]]] = {
    "sigmoid": (
        DpoSpec(beta=0.3),
        lambda h: -math.log(_sigmoid(0.3 * h)),
        lambda h: -0.3 * _sigmoid(-0.3 * h),
    ),
    "cdpo": (
        DpoSpec(beta=0.3, label_smoothing=0.2),
        lambda h: -0.8 * math.log(_sigmoid(0.3 * h)) - 0.2 * math.log(_sigmoid(-0.3 * h)),
        lambda h: 0.3 * (_sigmoid(0.3 * h) - 0.8),
    ),
    "ipo": (
        DpoSpec(loss="ipo", beta=0.3),
        lambda h: (h - 1 / 0.6) ** 2,
        lambda h: 2 * (h - 1 / 0.6),
    ),
    "hinge": (
        DpoSpec(loss="hinge", beta=0.9),
        lambda h: max(0.0, 1 - 0.9 * h),
        lambda h: -0.9 if 0.9 * h < 1 else 0.0,
    ),
    "robust": (
        DpoSpec(loss="robust", beta=0.3, label_smoothing=0.2),
        lambda h: (-0.8 * math.log(_sigmoid(0.3 * h)) + 0.2 * math.log(_sigmoid(-0.3 * h))) / 0.6,
        lambda h: -0.3 * (0.8 * _sigmoid(-0.3 * h) + 0.2 * _sigmoid(0.3 * h)) / 0.6,
    ),
}


@pytest.mark.parametrize("normalized", [False, True], ids=["sums", "means"])
@pytest.mark.parametrize("name", SLOPES)
def test_loss_and_gradient_are_those_derived_by_hand(name: str, normalized: bool) -> None:
    """Of a pair's difference h: dL/dlp is L'(h) on the chosen tokens, -L'(h) on the others; by the
    answer's length with means. Plain loops over the fixture, three pairs."""
    plain, value, slope = SLOPES[name]
    spec = plain.model_copy(update={"length_normalized": normalized})
    batch, log_probs = pair_fixture()
    output = loss_of(spec, batch, log_probs)
    output.loss.backward()
    new, mask = log_probs.detach().numpy(), batch.loss_mask.double().numpy()
    reference = batch.per_token["reference_log_probs"].numpy()
    expected, loss = np.zeros((6, 6)), 0.0
    for chosen, rejected in ((0, 1), (2, 3), (4, 5)):
        weights = {row: 1 / mask[row].sum() if normalized else 1.0 for row in (chosen, rejected)}
        ratios = {
            row: weights[row]
            * sum(new[row, t] - reference[row, t] for t in range(6) if mask[row, t])
            for row in (chosen, rejected)
        }
        h = ratios[chosen] - ratios[rejected]
        loss += value(h) / 3
        expected[chosen] = slope(h) / 3 * weights[chosen] * mask[chosen]
        expected[rejected] = -slope(h) / 3 * weights[rejected] * mask[rejected]
    assert float(output.loss.detach()) == pytest.approx(loss, abs=1e-7)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected), rtol=1e-12, atol=1e-15)


def test_a20_the_reference_pair_and_a_pair_without_an_answer() -> None:
    spec = DpoSpec(beta=0.1)
    batch, policy = answers([-10.0], [-14.0], unit=2)
    batch.per_token["reference_log_probs"][:, 1] = torch.tensor([-12.0, -13.0])
    output = loss_of(spec, batch, policy)
    assert float(output.loss.detach()) == pytest.approx(0.554355, abs=1e-6)
    assert means(output)["reward_margin"] == pytest.approx(0.3, abs=1e-12)

    batch, policy = answers([-4.0, -6.0], [-20.0], [-1.0], [-2.0], unit=2)
    batch.loss_mask[2] = 0.0  # what was too long has no answer left
    output = loss_of(spec, batch, policy)
    assert float(output.loss.detach()) == pytest.approx(0.313262, abs=1e-6)  # not 0.503204


def test_the_likelihood_term_is_a_mean_over_tokens_then_over_pairs() -> None:
    batch, policy = answers([-1.0, -1.0], [-2.0], [-3.0] * 6, [-1.0, -4.0], unit=2)
    plain = loss_of(DpoSpec(), batch, policy)
    with_nll = loss_of(DpoSpec(nll_coef=0.5), batch, policy)
    added = float((with_nll.loss - plain.loss).detach())
    assert added == pytest.approx(0.5 * (1.0 + 3.0) / 2, abs=1e-7)
    assert means(plain)["nll"] == pytest.approx(2.0)


def test_metrics_of_a_batch_worked_out_by_hand() -> None:
    batch, policy = answers([-1.0, -2.0], [-5.0], [-4.0], [-1.0, -1.0], unit=2)
    batch.per_token["reference_log_probs"][0, 1:] = torch.tensor([-2.0, -3.0])  # log-ratio +2
    batch.per_token["reference_log_probs"][1, 1] = -4.0  # -1
    batch.per_token["reference_log_probs"][2, 1] = -3.0  # -1
    batch.per_token["reference_log_probs"][3, 1:] = torch.tensor([-2.0, -3.0])  # +3
    assert means(loss_of(DpoSpec(beta=0.5), batch, policy)) == pytest.approx(
        {
            "reward_chosen": 0.5 * (2.0 - 1.0) / 2,
            "reward_rejected": 0.5 * (-1.0 + 3.0) / 2,
            "reward_margin": 0.5 * (3.0 - 4.0) / 2,
            "reward_accuracy": 0.5,
            "pairs_left_out": 0.0,
            "log_prob_chosen": (-3.0 - 4.0) / 2,
            "log_prob_rejected": (-5.0 - 2.0) / 2,
            "nll": (1.5 + 4.0) / 2,
            "entropy": 1.0,
        }
    )


def test_a_long_answers_difference_survives_float32() -> None:
    """Log-probs of 8000 that differ from the reference's by 1e-3 a token: summed in float32 and
    then subtracted, the last of 8 digits would be 5e-4."""
    batch, _ = answers([0.0] * 4000, [0.0] * 4000, unit=2)
    reference = batch.per_token["reference_log_probs"].float()
    reference[:, 1:] = -2.0
    policy = reference.clone()
    policy[0, 1:] += 2.0**-10
    batch = batch.with_per_token(reference_log_probs=reference)
    output = loss_of(DpoSpec(beta=1.0), batch, policy.requires_grad_())
    assert means(output)["reward_margin"] == pytest.approx(4000 / 1024, abs=1e-9)


def test_the_spec_names_this_class() -> None:
    assert isinstance(load_algorithm(DpoSpec()), Dpo)
    assert DpoSpec().keeps_reference
