import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch
from service.spec import GspoSpec
from tests.algorithms.reference_fixture import ADVANTAGES, LENGTHS, reference_fixture
from tests.algorithms.reference_loss import loss_of, value_and_gradient
from tests.algorithms.rollouts import rollout_of

WIDE = {"clip_low": 0.2, "clip_high": 0.2}


def test_values_that_trl_verl_and_openrlhf_agree_on() -> None:
    assert value_and_gradient(GspoSpec(**WIDE))[0] == pytest.approx(0.0982483, abs=6e-8)
    value, gradient = value_and_gradient(GspoSpec())
    assert value == pytest.approx(0.1051294, abs=6e-8)
    assert float(gradient.norm()) == pytest.approx(0.2427063, abs=6e-8)
    by_token = value_and_gradient(GspoSpec(**WIDE, loss_aggregation="token-mean"))[0]
    assert by_token == pytest.approx(-0.2278693, abs=6e-8)  # verl's


def test_the_gradient_is_the_one_derived_by_hand() -> None:
    """d/d lp_t = -A s / (|y| B) where the free branch counts: s = exp(mean log-ratio)."""
    batch, log_probs = reference_fixture()
    new, old = log_probs.detach(), batch.per_token["old_log_probs"]
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        ratio = math.exp(float((new - old)[row, 1 : 1 + length].mean()))
        advantage = ADVANTAGES[row]
        stopped = ratio > 1.1 if advantage > 0 else ratio < 0.9
        if not stopped:
            expected[row, 1 : 1 + length] = -advantage * ratio / (length * 6)
    assert (expected[:, 1] == 0).any()  # some are bounded
    _, gradient = value_and_gradient(GspoSpec(clip_low=0.1, clip_high=0.1))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_gspo_token_is_gspo_where_all_tokens_share_an_advantage() -> None:
    """Section 4.3 of the paper: the same value, and the same gradient."""
    value, gradient = value_and_gradient(GspoSpec(**WIDE))
    same, same_gradient = value_and_gradient(GspoSpec(**WIDE, token_level=True))
    assert same == pytest.approx(value, abs=1e-15)
    torch.testing.assert_close(same_gradient, gradient, rtol=1e-12, atol=1e-16)


def test_gspo_token_gives_each_token_the_gradient_of_its_own_advantage() -> None:
    batch, _ = reference_fixture()
    draw = torch.Generator().manual_seed(4)
    advantages = torch.randn(6, 6, dtype=torch.float64, generator=draw)
    none = {"clip_low": 0.999, "clip_high": 10.0}
    _, gradient = value_and_gradient(GspoSpec(**none, token_level=True), advantages=advantages)
    _, log_probs = reference_fixture()
    difference = (log_probs.detach() - batch.per_token["old_log_probs"]) * batch.loss_mask
    counts = batch.loss_mask.sum(dim=1, keepdim=True)
    ratio = (difference.sum(dim=1, keepdim=True) / counts).exp()
    expected = -ratio * advantages * batch.loss_mask / (counts * 6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)


def test_a17_a_long_answer_counts_as_much_as_a_short_one() -> None:
    """Lengths 1 and 3, ratio 1, advantages 1 and -1: 0 (weighed by tokens it would be 0.5)."""
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    batch = Batch(
        tokens=zeros.long(),
        lengths=torch.tensor([2, 4]),
        loss_mask=torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]]),
        per_token={"advantages": torch.tensor([[1.0], [-1.0]]).expand(2, 4)},
    )
    output = loss_of(GspoSpec(), batch, zeros.requires_grad_())
    assert float(output.loss.detach()) == 0.0


@pytest.mark.parametrize("token_level", [False, True])
def test_a17_padding_never_leaks_into_the_ratio(token_level: bool) -> None:
    batch = Batch(
        tokens=torch.zeros(1, 4, dtype=torch.int64),
        lengths=torch.tensor([4]),
        loss_mask=torch.tensor([[0.0, 1.0, 1.0, 0.0]]),
        per_token={
            "advantages": torch.ones(1, 4),
            "old_log_probs": torch.full((1, 4), -9.0, dtype=torch.float64),
        },
    )
    log_probs = torch.tensor([[0.0, -8.8, -8.6, -4.0]], dtype=torch.float64, requires_grad=True)
    spec = GspoSpec(clip_low=0.5, clip_high=9.0, token_level=token_level)
    output = loss_of(spec, batch, log_probs)
    assert float(output.loss.detach()) == pytest.approx(-1.349859, abs=1e-6)
    assert output.sums["ratio_deviation"] == (pytest.approx(0.349859, abs=1e-6), 1.0)


def test_a03_advantages_are_those_of_grpo() -> None:
    rollout = rollout_of([[1.0], [0.0]], group_size=2)
    credit = load_algorithm(GspoSpec(group_size=2)).advantages(rollout)
    assert credit.advantages[:, 1].tolist() == pytest.approx([0.707107, -0.707107], abs=2e-6)
    plain = GspoSpec(group_size=2, normalize_by_std=False)
    assert load_algorithm(plain).advantages(rollout).advantages[:, 1].tolist() == [0.5, -0.5]
