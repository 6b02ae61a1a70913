"""The reward model's loss against values that TRL and OpenRLHF agree on."""

import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer, PolicyOutputs
from algorithms.reward_model import RewardModel
from service.spec import RewardModelSpec
from tests.algorithms.answer_losses import loss_of, means
from tests.algorithms.reference_fixture import MARGINS, SCORES, pair_fixture


def _scored(scores: list[float]) -> tuple[Batch, torch.Tensor]:
    """Each score at its row's last token, and something else at all others."""
    batch, _ = pair_fixture()
    numbers = torch.full((6, 6), 50.0, dtype=torch.float64)
    numbers[torch.arange(6), batch.lengths - 1] = torch.tensor(scores, dtype=torch.float64)
    return batch, numbers.requires_grad_()


def _with_margins(batch: Batch) -> Batch:
    """Each pair's margin stands on its chosen row; what is on the other one does not count."""
    margins = torch.full((6,), 99.0)
    margins[0::2] = torch.tensor(MARGINS)
    return batch.with_per_sequence(margin=margins)


@pytest.mark.parametrize(
    ("fields", "margins", "value"),
    [
        ({}, False, 0.499467),
        ({}, True, 0.5895736),
        ({"margins": False}, True, 0.499467),
        ({"center_coef": 0.01}, False, 0.508167),
    ],
)
def test_values_of_the_references(fields: dict[str, object], margins: bool, value: float) -> None:
    batch, numbers = _scored(SCORES)
    batch = _with_margins(batch) if margins else batch
    output = loss_of(RewardModelSpec(**fields), batch, numbers)
    assert float(output.loss.detach()) == pytest.approx(value, abs=6e-7)


def test_the_gradient_reaches_each_answers_last_token_alone() -> None:
    batch, numbers = _scored(SCORES)
    loss_of(RewardModelSpec(center_coef=0.3), _with_margins(batch), numbers).loss.backward()
    expected = torch.zeros(6, 6, dtype=torch.float64)
    last = (batch.lengths - 1).tolist()
    for pair, margin in enumerate(MARGINS):
        chosen, rejected = SCORES[2 * pair : 2 * pair + 2]
        wrong = 1 / (1 + math.exp(chosen - rejected - margin))
        centring = 2 * 0.3 * (chosen + rejected)
        expected[2 * pair, last[2 * pair]] = (-wrong + centring) / 3
        expected[2 * pair + 1, last[2 * pair + 1]] = (wrong + centring) / 3
    torch.testing.assert_close(numbers.grad, expected, rtol=1e-6, atol=1e-12)


def test_metrics_are_those_of_scores() -> None:
    batch, numbers = _scored(SCORES)
    assert means(loss_of(RewardModelSpec(), batch, numbers)) == pytest.approx(
        {
            "reward_chosen": (1.1 - 0.2 + 1.3) / 3,
            "reward_rejected": (0.5 + 0.3 - 1.1) / 3,
            "reward_margin": (0.6 - 0.5 + 2.4) / 3,
            "reward_accuracy": 2 / 3,
            "pairs_left_out": 0.0,
        }
    )


def test_a_policys_outputs_are_refused() -> None:
    batch, numbers = pair_fixture()
    outputs = PolicyOutputs(log_probs=numbers, entropy=torch.ones_like(numbers))
    with pytest.raises(TypeError, match="values"):
        RewardModel(RewardModelSpec()).loss(outputs, batch, Normalizer.of(batch))


def test_the_spec_names_this_class() -> None:
    assert isinstance(load_algorithm(RewardModelSpec()), RewardModel)
    assert RewardModelSpec().head == "value"
