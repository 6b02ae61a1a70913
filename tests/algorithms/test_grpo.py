"""The GRPO loss against values that TRL, verl and OpenRLHF agree on, and formulas in fp64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer, PolicyOutputs
from algorithms.grpo import Grpo
from algorithms.samples import Rollout
from service.spec import GrpoSpec
from tests.algorithms.reference_fixture import ADVANTAGES, LENGTHS, reference_fixture


def _loss(spec: GrpoSpec, batch: Batch, log_probs: Tensor, normalizer: Normalizer | None = None):
    outputs = PolicyOutputs(log_probs=log_probs, entropy=torch.ones_like(log_probs))
    return Grpo(spec).loss(outputs, batch, normalizer or Normalizer.of(batch))


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
    output = _loss(GrpoSpec(**fields), batch, log_probs)
    assert float(output.loss.detach()) == pytest.approx(value, abs=6e-8)
    if gradient_norm is not None:
        output.loss.backward()
        assert float(log_probs.grad.norm()) == pytest.approx(gradient_norm, abs=6e-8)


def test_a07_kl_of_thereference_fixture() -> None:
    batch, log_probs = reference_fixture()
    total, count = _loss(GrpoSpec(kl_coef=0.04), batch, log_probs).sums["kl"]
    assert total / count == pytest.approx(0.2414914, abs=6e-8)


def test_the_gradient_is_the_one_derived_by_hand() -> None:
    """d/dlp = -A r / N where the free branch counts, 0 where it is clipped; k3 adds 1 - q/p."""
    batch, log_probs = reference_fixture()
    spec = GrpoSpec(clip_low=0.1, clip_high=0.3, kl_coef=0.05)
    _loss(spec, batch, log_probs).loss.backward()
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


def test_with_one_update_the_old_policy_is_the_current_one() -> None:
    batch, log_probs = reference_fixture()
    bare = Batch(
        tokens=batch.tokens,
        lengths=batch.lengths,
        loss_mask=batch.loss_mask,
        per_token={"advantages": batch.per_token["advantages"]},
    )
    output = _loss(GrpoSpec(), bare, log_probs)
    output.loss.backward()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None]
    expected = -advantages * batch.loss_mask / sum(LENGTHS)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-14, atol=0)
    assert output.sums["ratio_deviation"] == (0.0, 6.0)
    assert output.sums["ratio_clip_fraction"] == (0.0, 20.0)


def test_a01_any_split_into_micro_batches_gives_the_same_loss_and_gradient() -> None:
    spec = GrpoSpec(kl_coef=0.1)
    batch, whole = reference_fixture()
    normalizer = Normalizer.of(batch)
    expected = _loss(spec, batch, whole, normalizer)
    expected.loss.backward()
    _, parts = reference_fixture()
    shares = [
        _loss(spec, batch.rows(slice(b, b + 2)), parts[b : b + 2], normalizer) for b in (0, 2, 4)
    ]
    sum(share.loss for share in shares).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-15)
    for name, (total, count) in expected.sums.items():
        assert sum(s.sums[name][0] for s in shares) == pytest.approx(total, abs=1e-5), name
        assert sum(s.sums[name][1] for s in shares) == count, name


def test_what_is_masked_may_be_anything_and_changes_nothing() -> None:
    batch, clean = reference_fixture()
    _loss(GrpoSpec(kl_coef=0.1), batch, clean).loss.backward()
    dirty_batch, dirty = reference_fixture()
    masked = dirty_batch.loss_mask == 0
    with torch.no_grad():
        dirty[masked] = float("nan")
    dirty_batch.per_token["old_log_probs"][masked] = -math.inf
    dirty_batch.per_token["reference_log_probs"][masked] = math.inf
    output = _loss(GrpoSpec(kl_coef=0.1), dirty_batch, dirty)
    output.loss.backward()
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
    assert all(math.isfinite(total) for total, _ in output.sums.values())


def test_a28_a_micro_batch_with_nothing_to_train_adds_zero_to_sum_and_count() -> None:
    batch, log_probs = reference_fixture()
    normalizer = Normalizer.of(batch)
    batch.loss_mask.zero_()
    output = _loss(GrpoSpec(kl_coef=0.1), batch, log_probs, normalizer)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert torch.equal(log_probs.grad, torch.zeros_like(log_probs))
    assert set(output.sums.values()) == {(0.0, 0.0)}


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
    output = _loss(GrpoSpec(), batch, torch.tensor([[0.0, trainer]], requires_grad=True))
    assert output.sums["rollout_ratio_deviation"] == pytest.approx((0.2, 1.0), abs=1e-6)
    ratio = 1.2
    assert output.sums["rollout_kl"][0] == pytest.approx(ratio - math.log(ratio) - 1, abs=1e-6)


def test_the_spec_names_this_class_and_decides_what_is_computed() -> None:
    plain = load_algorithm(GrpoSpec())
    assert isinstance(plain, Grpo)
    assert not plain.needs_old_log_probs
    full = load_algorithm(GrpoSpec(updates_per_rollout=2))
    assert (full.needs_old_log_probs, full.updates_per_rollout) == (True, 2)
    assert load_algorithm(GrpoSpec(mini_batches=2)).needs_old_log_probs
    assert load_algorithm(GrpoSpec(kl_coef=0.1, kl_in="reward")).needs_old_log_probs


def test_a03_advantages_are_taken_group_by_group() -> None:
    rewards = torch.zeros(4, 3)
    rewards[:, 2] = torch.tensor([1.0, 0.0, 5.0, 3.0])
    mask = torch.tensor([[0.0, 1.0, 1.0]]).repeat(4, 1)
    batch = Batch(
        tokens=torch.zeros(4, 3, dtype=torch.int64), lengths=torch.full((4,), 3), loss_mask=mask
    )
    scored = torch.ones(4, dtype=torch.bool)
    rollout = Rollout(batch=batch, rewards=rewards, scored=scored, group_size=2)
    credit = Grpo(GrpoSpec(group_size=2)).advantages(rollout)
    expected = torch.tensor([0.707107, -0.707107, 0.707107, -0.707107]).unsqueeze(1).expand(4, 3)
    torch.testing.assert_close(credit.advantages.float(), expected, atol=2e-6, rtol=0)
