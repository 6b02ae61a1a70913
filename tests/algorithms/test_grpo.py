"""The GRPO loss against values that TRL, verl and OpenRLHF agree on, and formulas in fp64."""

import math

import numpy as np
import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch
from service.spec import GrpoSpec
from tests.algorithms.reference_fixture import ADVANTAGES, LENGTHS, reference_fixture
from tests.algorithms.reference_loss import loss_of
from tests.algorithms.rollouts import rollout_of


@pytest.mark.parametrize(
    ("fields", "value", "gradient_norm"),
    [
        ({"loss_aggregation": "token-mean"}, -0.2100289, 0.1996473),
        ({"loss_aggregation": "seq-mean-token-mean"}, 0.1170144, 0.2568266),
        ({"loss_aggregation": "seq-mean-token-sum"}, -0.7000964, None),
        ({"loss_aggregation": "token-mean", "clip_high": 0.28}, -0.2204289, None),
        ({"loss_aggregation": "seq-mean-token-mean", "kl_coef": 0.04}, 0.1260001, None),
    ],
)
def test_values_that_the_references_agree_on(
    fields: dict[str, object], value: float, gradient_norm: float | None
) -> None:
    batch, log_probs = reference_fixture()
    output = loss_of(GrpoSpec(**fields), batch, log_probs)
    assert float(output.loss.detach()) == pytest.approx(value, abs=6e-8)
    if gradient_norm is not None:
        output.loss.backward()
        assert float(log_probs.grad.norm()) == pytest.approx(gradient_norm, abs=6e-8)


def test_a07_kl_of_the_reference_fixture() -> None:
    batch, log_probs = reference_fixture()
    total, count = loss_of(GrpoSpec(kl_coef=0.04), batch, log_probs).sums["kl"]
    assert total / count == pytest.approx(0.2414914, abs=6e-8)


def test_the_gradient_is_the_one_derived_by_hand() -> None:
    """d/dlp = -A r / N where the free branch counts, 0 where it is clipped; k3 adds 1 - q/p."""
    batch, log_probs = reference_fixture()
    spec = GrpoSpec(clip_low=0.1, clip_high=0.3, kl_coef=0.05)
    loss_of(spec, batch, log_probs).loss.backward()
    new, old = log_probs.detach().numpy(), batch.per_token["old_log_probs"].numpy()
    reference = batch.per_token["reference_log_probs"].numpy()
    mask, expected = batch.loss_mask.numpy(), np.zeros((6, 6))
    for b in range(6):
        for t in range(6):
            if not mask[b, t]:
                continue
            ratio, advantage = math.exp(new[b, t] - old[b, t]), ADVANTAGES[b]
            stopped = (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.9)
            policy = 0.0 if stopped else -advantage * ratio
            expected[b, t] = policy + 0.05 * (1 - math.exp(reference[b, t] - new[b, t]))
    torch.testing.assert_close(
        log_probs.grad, torch.tensor(expected / sum(LENGTHS)), rtol=1e-12, atol=1e-15
    )


def test_a13_a15_a_sampler_that_disagrees_shows_in_the_metrics() -> None:
    """Log-probs before temperature 0.5 on one side: -0.287682 where the trainer has -0.105361."""
    trainer, sampler = math.log(0.9), math.log(0.75)
    batch = Batch(
        tokens=torch.tensor([[0, 1]]),
        lengths=torch.tensor([2]),
        loss_mask=torch.tensor([[0.0, 1.0]]),
        per_token={
            "rollout_log_probs": torch.tensor([[0.0, sampler]]),
            "advantages": torch.ones(1, 2),
        },
    )
    output = loss_of(GrpoSpec(), batch, torch.tensor([[0.0, trainer]], requires_grad=True))
    assert output.sums["rollout_ratio_deviation"] == pytest.approx((0.2, 1.0), abs=1e-6)
    ratio = 1.2
    assert output.sums["rollout_kl"][0] == pytest.approx(ratio - math.log(ratio) - 1, abs=1e-6)


def test_a03_advantages_are_taken_group_by_group() -> None:
    rollout = rollout_of([[0.0, 1.0], [0.0], [5.0], [0.0, 3.0]], group_size=2)
    credit = load_algorithm(GrpoSpec(group_size=2)).advantages(rollout)
    expected = torch.tensor([0.707107, -0.707107, 0.707107, -0.707107]).unsqueeze(1).expand(4, 3)
    torch.testing.assert_close(credit.advantages.float(), expected, atol=2e-6, rtol=0)
    assert credit.metrics == {"groups_unscored": 0, "groups_flat_rate": 0.0}


def test_rewards_of_several_turns_are_one_return() -> None:
    rollout = rollout_of([[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]], mask=[[1, 0, 1]] * 2, group_size=2)
    spec = GrpoSpec(group_size=2, normalize_by_std=False)
    assert load_algorithm(spec).advantages(rollout).advantages.tolist() == [[0.5] * 4, [-0.5] * 4]
