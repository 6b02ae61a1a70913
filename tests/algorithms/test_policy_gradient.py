"""What must be true of every policy-gradient algorithm of the registry."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer, PolicyOutputs
from algorithms.losses.divergence import estimate_kl
from algorithms.rollout.episode import Segment
from algorithms.rollout.tensors import episode_batch, episode_rollout
from algorithms.samples import Rollout
from service.spec import (
    GrpoSpec,
    PolicyGradientSpec,
    PpoSpec,
    ReinforcePlusPlusSpec,
    RewardSpec,
    RolloutCorrection,
    algorithm_specs,
)
from tests.algorithms.reference_fixture import LENGTHS, reference_fixture
from tests.algorithms.reference_loss import loss_of
from tests.algorithms.rollout.episodes import episode, turn
from tests.algorithms.rollouts import rollout_of

EVERY = [spec for spec in algorithm_specs().values() if issubclass(spec, PolicyGradientSpec)]
FULL: Mapping[str, object] = {
    "kl_coef": 0.1,
    "kl_in": "loss",
    "kl_estimator": "k3",
    "entropy_coef": 0.01,
    "rollout_correction": {"level": "token", "high": 1.5},
}
every = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.model_fields["type"].default)


def _fixture() -> tuple[Batch, Tensor]:
    """The reference fixture, with log-probs of a generator that is a little off."""
    batch, log_probs = reference_fixture()
    draw = torch.Generator().manual_seed(11)
    noise = 0.3 * torch.randn(6, 6, dtype=torch.float64, generator=draw)
    rollout = batch.per_token["old_log_probs"] + noise
    return batch.with_per_token(rollout_log_probs=rollout), log_probs


@every
def test_a01_no_split_and_no_order_of_rows_changes_loss_gradient_or_metric(
    kind: type[PolicyGradientSpec],
) -> None:
    spec = kind.model_validate(FULL)
    batch, whole = _fixture()
    normalizer = Normalizer.of(batch)
    expected = loss_of(spec, batch, whole, normalizer)
    expected.loss.backward()
    for parts in ([[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 3], [4, 2]], [[2, 4, 0], [1, 3, 5]]):
        _, again = _fixture()
        shares = [loss_of(spec, batch.rows(torch.tensor(p)), again[p], normalizer) for p in parts]
        total = torch.stack([share.loss for share in shares]).sum()
        total.backward()
        assert float(total.detach()) == pytest.approx(float(expected.loss.detach()), abs=1e-14)
        torch.testing.assert_close(again.grad, whole.grad, rtol=0, atol=1e-14)
        for name, (sum_of, count) in expected.sums.items():
            assert sum(s.sums[name][0] for s in shares) == pytest.approx(sum_of, abs=1e-9), name
            assert sum(s.sums[name][1] for s in shares) == count, name


@every
def test_a25_what_is_masked_may_be_anything_and_changes_nothing(
    kind: type[PolicyGradientSpec],
) -> None:
    spec = kind.model_validate(FULL)
    batch, clean = _fixture()
    expected = loss_of(spec, batch, clean)
    expected.loss.backward()
    dirty_batch, dirty = _fixture()
    masked = batch.loss_mask == 0
    with torch.no_grad():
        dirty[masked] = math.nan
    for name, filler in (("old", -math.inf), ("reference", math.inf), ("rollout", math.nan)):
        dirty_batch.per_token[f"{name}_log_probs"][masked] = filler
    dirty_batch.per_token["advantages"][masked] = math.nan
    output = loss_of(spec, dirty_batch, dirty)
    output.loss.backward()
    assert output.loss == expected.loss
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
    assert output.sums == expected.sums


@every
def test_a28_a_micro_batch_with_nothing_to_train_adds_zero_to_sum_and_count(
    kind: type[PolicyGradientSpec],
) -> None:
    batch, log_probs = _fixture()
    normalizer = Normalizer.of(batch)
    batch.loss_mask.zero_()
    output = loss_of(kind.model_validate(FULL), batch, log_probs, normalizer)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert torch.equal(log_probs.grad, torch.zeros_like(log_probs))
    assert set(output.sums.values()) == {(0.0, 0.0)}


@every
@pytest.mark.parametrize("distance", [300.0, -300.0])
def test_extreme_log_ratios_stay_finite(kind: type[PolicyGradientSpec], distance: float) -> None:
    batch, _ = _fixture()
    far = (batch.per_token["old_log_probs"] + distance).float().requires_grad_()
    output = loss_of(kind.model_validate(FULL), batch, far)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert torch.isfinite(far.grad).all()
    assert all(math.isfinite(total) for total, _ in output.sums.values())


@every
def test_a13_on_the_first_update_the_ratio_is_one_and_the_gradient_is_reinforce(
    kind: type[PolicyGradientSpec],
) -> None:
    """d loss / d log p = -A / divisor for each of them: the sampled policy is the current one."""
    batch, log_probs = reference_fixture()
    spec = kind.model_validate({"kl_coef": 0.0, "entropy_coef": 0.0})
    advantages = batch.per_token["advantages"]
    bare = replace(batch, per_token={"advantages": advantages})
    output = loss_of(spec, bare, log_probs)
    output.loss.backward()
    counts = torch.tensor(LENGTHS, dtype=torch.float64).unsqueeze(1)
    divisor = {
        "token-mean": torch.tensor(20.0),
        "seq-mean-token-mean": 6.0 * counts,
        "seq-mean-token-sum": torch.tensor(6.0),
        "seq-mean-token-sum-norm": torch.tensor(6.0 * (spec.length_constant or 1)),
    }[spec.loss_aggregation]
    expected = -advantages * batch.loss_mask / divisor
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=0)
    assert output.sums["ratio_deviation"] == (0.0, 6.0)
    assert output.sums["ratio_clip_fraction"] == (0.0, 20.0)
    assert output.sums["approx_kl"] == (0.0, 20.0)


def test_a07_kl_in_the_loss_is_the_named_estimate_with_its_gradient() -> None:
    for estimator, mean in (("k1", 0.0235114), ("k2", 0.2182594), ("k3", 0.2414914)):
        batch, log_probs = reference_fixture()
        batch = batch.with_per_token(advantages=torch.zeros(6, 6))
        spec = GrpoSpec(kl_coef=0.5, kl_estimator=estimator)
        output = loss_of(spec, batch, log_probs)
        output.loss.backward()
        assert output.sums["kl"][0] / 20 == pytest.approx(mean, abs=6e-8)
        assert float(output.loss.detach()) == pytest.approx(0.5 * mean, abs=6e-8)
        difference = log_probs.detach() - batch.per_token["reference_log_probs"]
        by_hand = {
            "k1": torch.ones_like(difference),
            "k2": difference,
            "k3": 1 - torch.exp(-difference),
        }[estimator]
        expected = 0.5 * by_hand * batch.loss_mask / 20
        torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=1e-15)


def test_a07_kl_in_the_reward_lowers_it_where_the_policy_left_the_reference() -> None:
    """Reward 1, weight 0.1: 1 - 0.1 ln 2 = 0.930685; nothing is added to the loss."""
    spec = GrpoSpec(kl_coef=0.1, kl_in="reward", kl_estimator="k1", normalize_by_std=False)
    rollout = rollout_of(
        [[1.0], [0.0]],
        group_size=2,
        old_log_probs=[[math.log(0.5)], [math.log(0.5)]],
        reference_log_probs=[[math.log(0.25)], [math.log(0.5)]],
    )
    credit = load_algorithm(spec).advantages(rollout)
    assert credit.advantages[:, 1].tolist() == pytest.approx([0.930685 / 2, -0.930685 / 2])
    assert credit.metrics["reward_kl"] == pytest.approx(0.693147 / 2, abs=1e-6)
    assert credit.metrics["kl_coef"] == 0.1
    batch, log_probs = reference_fixture()
    output = loss_of(spec, batch, log_probs)
    assert float(output.loss.detach()) == pytest.approx(-0.2100289, abs=6e-8)
    assert "kl" not in output.sums


def test_entropy_is_added_to_what_is_maximised() -> None:
    batch, log_probs = reference_fixture()
    entropy = torch.rand(6, 6, dtype=torch.float64, requires_grad=True)
    outputs = PolicyOutputs(log_probs=log_probs, entropy=entropy)
    spec = GrpoSpec(entropy_coef=0.3)
    output = load_algorithm(spec).loss(outputs, batch, Normalizer.of(batch))
    output.loss.backward()
    expected = -0.3 * batch.loss_mask.double() / 20
    torch.testing.assert_close(entropy.grad, expected, rtol=1e-12, atol=0)
    mean = float((entropy.detach() * batch.loss_mask).sum()) / 20
    assert float(output.loss.detach()) == pytest.approx(-0.2100289 - 0.3 * mean, abs=6e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_samples_are_weighed_by_the_samplers_own_log_probs(level: str, mode: str) -> None:
    """Against a loop over tokens. The KL term is not weighed."""
    correction = RolloutCorrection(level=level, mode=mode, low=0.6, high=1.4)
    spec = GrpoSpec(rollout_correction=correction, kl_coef=0.1)
    batch, log_probs = _fixture()
    output = loss_of(spec, batch, log_probs)
    plain_batch, plain = _fixture()
    without = loss_of(GrpoSpec(kl_coef=0.1), plain_batch, plain)
    old, rollout = batch.per_token["old_log_probs"], batch.per_token["rollout_log_probs"]
    weights, expected = [], 0.0
    for row, length in enumerate(LENGTHS):
        logs = [float(old[row, t] - rollout[row, t]) for t in range(1, length + 1)]
        for t, log in enumerate(logs, start=1):
            weight = math.exp(log if level == "token" else math.fsum(logs))
            inside = 0.6 <= weight <= 1.4
            bounded = weight if inside else 0.0
            weight = bounded if mode == "mask" else min(max(weight, 0.6), 1.4)
            weights.append(weight)
            ratio = math.exp(float(log_probs[row, t].detach() - old[row, t]))
            advantage = float(batch.per_token["advantages"][row, t])
            surrogate = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            expected += weight * surrogate / 20
    kl = estimate_kl(log_probs.detach(), batch.per_token["reference_log_probs"], "k3")
    expected += 0.1 * float((kl * batch.loss_mask).sum()) / 20
    assert float(output.loss.detach()) == pytest.approx(expected, abs=1e-12)
    assert output.sums["rollout_weight"] == (pytest.approx(math.fsum(weights)), 20.0)
    assert float(output.loss.detach()) != pytest.approx(float(without.loss.detach()), abs=1e-3)


def test_overlong_answers_lose_reward_before_advantages() -> None:
    spec = GrpoSpec(
        normalize_by_std=False, overlong={"max_tokens": 4, "buffer_tokens": 2, "penalty": 1.0}
    )
    rollout = rollout_of([[0.0, 1.0], [0.0, 0.0, 0.0, 1.0]], group_size=2)
    credit = load_algorithm(spec).advantages(rollout)
    assert credit.advantages[:, 1].tolist() == [0.5, -0.5]
    assert credit.metrics["length_penalty"] == 0.5


def _unscored(kind: type[PolicyGradientSpec], filler: float) -> Rollout:
    """Two groups of three; row 1 was not scored, nor was the whole second group."""
    tensors = {
        name: [[-1.0, -0.5], [filler] * 2, [-0.7, -0.9], *([[filler] * 2] * 3)]
        for name in ("old_log_probs", "reference_log_probs", "values")
    }
    tensors["reference_log_probs"][2] = [-0.9, -0.6]
    return rollout_of(
        [[0.0, 1.0], None, [0.5, 0.0], None, None, None],
        mask=[[1, 1]] * 6,
        group_size=3,
        baselines=[0.25] * 3 + [math.nan] * 3 if kind.greedy_baseline else None,
        **tensors,
    )


@every
def test_a06_what_was_not_scored_takes_no_part_anywhere(kind: type[PolicyGradientSpec]) -> None:
    spec = kind.model_validate({"kl_coef": 0.1, "kl_in": "reward", "group_size": 3})
    algorithm = load_algorithm(spec)
    credit = algorithm.advantages(_unscored(kind, math.nan))
    other = load_algorithm(spec).advantages(_unscored(kind, 123.0))
    assert torch.equal(credit.advantages[[0, 2]], other.advantages[[0, 2]])
    assert torch.isfinite(credit.advantages).all()
    assert (credit.advantages[[0, 2], 1:] != 0).all()
    assert credit.metrics == other.metrics
    assert all(math.isfinite(value) for value in credit.metrics.values())
    # The same as where nobody ever asked: the KL and the advantages are of two rows.
    alone = rollout_of(
        [[0.0, 1.0], [0.5, 0.0]],
        group_size=2,
        baselines=[0.25] * 2 if kind.greedy_baseline else None,
        old_log_probs=[[-1.0, -0.5], [-0.7, -0.9]],
        reference_log_probs=[[-1.0, -0.5], [-0.9, -0.6]],
        values=[[-1.0, -0.5], [-0.7, -0.9]],
    )
    expected = load_algorithm(spec).advantages(alone)
    assert credit.metrics["reward_kl"] == pytest.approx(expected.metrics["reward_kl"])
    torch.testing.assert_close(
        credit.advantages[[0, 2], 1:], expected.advantages[:, 1:], rtol=1e-12, atol=0
    )


@every
def test_a06_a_batch_that_nobody_scored_is_zeros_and_counted(
    kind: type[PolicyGradientSpec],
) -> None:
    spec = kind.model_validate({"group_size": 3})
    rollout = rollout_of(
        [None] * 3,
        group_size=3,
        baselines=[math.nan] * 3 if kind.greedy_baseline else None,
        old_log_probs=[[math.nan]] * 3,
        reference_log_probs=[[math.nan]] * 3,
        values=[[math.nan]] * 3,
    )
    credit = load_algorithm(spec).advantages(rollout)
    assert torch.equal(credit.advantages, torch.zeros(3, 2, dtype=torch.float64))
    assert all(math.isfinite(value) for value in credit.metrics.values())
    if "groups_unscored" in credit.metrics:
        assert credit.metrics["groups_unscored"] == 1


def test_a06_groups_that_teach_nothing_are_counted() -> None:
    rollout = rollout_of([[1.0], [1.0], [0.0], [1.0], None, None, [1.0], None], group_size=2)
    for spec in (GrpoSpec(group_size=2), ReinforcePlusPlusSpec(group_size=2, baseline="group")):
        metrics = load_algorithm(spec).advantages(rollout).metrics
        assert metrics["groups_unscored"] == 1
        assert metrics["groups_flat_rate"] == pytest.approx(2 / 3)


@every
def test_log_probs_of_the_old_policy_are_asked_for_only_where_they_are_read(
    kind: type[PolicyGradientSpec],
) -> None:
    free = {"kl_coef": 0.0}
    assert not load_algorithm(kind.model_validate(free)).needs_old_log_probs
    for fields in (
        {**free, "updates_per_rollout": 2},
        {**free, "mini_batches": 2},
        {"kl_coef": 0.1, "kl_in": "reward"},
    ):
        assert load_algorithm(kind.model_validate(fields)).needs_old_log_probs
    passes = load_algorithm(kind.model_validate({"updates_per_rollout": 3, "mini_batches": 4}))
    assert (passes.updates_per_rollout, passes.mini_batches) == (3, 4)


def test_a30_i05_rewards_of_turns_reach_the_tokens_that_earned_them() -> None:
    """From episodes on: turns that earn 0.25 and 1, and an answer that is cut and earns 0.5."""
    said = Segment(origin="observation", token_ids=[3, 3])
    episodes = [
        episode([turn([5, 9]), said, turn([6, 7, 9])], 0.25, 1.0),
        episode([turn([5, 6, 7], "length")], 0.5),
    ]
    reward = RewardSpec(unfinished_penalty=0.5)
    batch = episode_batch(episodes, reward=reward, padding_id=0, max_length=64)
    rollout = episode_rollout(episodes, batch, reward=reward)
    values = torch.zeros_like(batch.loss_mask)
    rollout = replace(rollout, batch=batch.with_per_token(values=values))
    spec = PpoSpec(kl_coef=0.0, gae_lambda=1.0, whiten_advantages=False)
    returns = load_algorithm(spec).advantages(rollout).returns
    assert returns[0, :9].tolist() == [0, 0, 1.25, 1.25, 0, 0, 1.0, 1.0, 1.0]
    assert returns[1].tolist() == [0.0] * returns.shape[1]  # 0.5 less the penalty of 0.5
    whole = load_algorithm(GrpoSpec(normalize_by_std=False)).advantages(
        replace(rollout, group_size=2)
    )
    assert whole.advantages[:, 2].tolist() == [0.625, -0.625]
