"""PPO against values that verl and OpenRLHF agree on, and against values by hand."""

import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Normalizer, ValueOutputs
from algorithms.ppo import Ppo
from service.spec import AdaptiveKl, PpoSpec
from tests.algorithms.reference_fixture import LENGTHS, REWARDS, reference_fixture
from tests.algorithms.reference_loss import value_and_gradient
from tests.algorithms.rollouts import rollout_of

NO_KL = {"kl_coef": 0.0}


@pytest.mark.parametrize(
    ("aggregation", "value", "norm"),
    [("token-mean", -0.2100289, 0.1996473), ("seq-mean-token-mean", 0.1170144, 0.2568266)],
)
def test_policy_losses_that_the_references_agree_on(
    aggregation: str, value: float, norm: float
) -> None:
    spec = PpoSpec.model_validate({**NO_KL, "loss_aggregation": aggregation})
    found, gradient = value_and_gradient(spec)
    assert found == pytest.approx(value, abs=6e-8)
    assert float(gradient.norm()) == pytest.approx(norm, abs=6e-8)


def _value_loss(spec: PpoSpec, split: list[int], *, dirty: bool = False):
    batch, _ = reference_fixture()
    of = batch.per_token
    batch = batch.with_per_token(returns=of["values"] + of["advantages"])
    values = of["predicted_values"].clone()
    if dirty:
        nothing = batch.loss_mask == 0
        values[nothing] = math.nan
        of["values"][nothing] = math.inf
        batch.per_token["returns"][nothing] = -math.inf
    values.requires_grad_()
    normalizer, algorithm, start, shares = Normalizer.of(batch), load_algorithm(spec), 0, []
    for size in split:
        rows = slice(start, start + size)
        outputs = ValueOutputs(values=values[rows], scores=torch.zeros(size))
        shares.append(algorithm.value_loss(outputs, batch.rows(rows), normalizer))
        start += size
    total = torch.stack([share.loss for share in shares]).sum()
    total.backward()
    pairs = [share.sums["value_clip_fraction"] for share in shares]
    return float(total.detach()), values.grad, [sum(part) for part in zip(*pairs, strict=True)]


@pytest.mark.parametrize(("clip", "expected"), [(0.2, 0.8361672), (0.5, 0.8214888)])
def test_a24_value_losses_that_verl_and_openrlhf_agree_on(clip: float, expected: float) -> None:
    loss, _, (clipped, count) = _value_loss(PpoSpec(value_clip=clip), [6])
    assert loss == pytest.approx(expected, abs=6e-8)
    assert count == 20
    assert (0 < clipped < 20) == (clip == 0.2)  # no value of the fixture moves by more than 0.5


def test_the_gradient_of_the_critic_by_hand() -> None:
    """(V - R) / N where the error of the new value is the larger one, else 0."""
    batch, _ = reference_fixture()
    of = batch.per_token
    new, old, target = of["predicted_values"], of["values"], of["values"] + of["advantages"]
    near = old + (new - old).clamp(-0.2, 0.2)
    counts = (new - target).abs() >= (near - target).abs()
    counts |= (new - old).abs() <= 0.2
    expected = torch.where(counts, new - target, 0.0) * batch.loss_mask / 20
    _, gradient, _ = _value_loss(PpoSpec(), [6])
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_a01_a25_the_critics_loss_knows_neither_split_nor_padding() -> None:
    expected, gradient, sums = _value_loss(PpoSpec(), [6])
    for split, dirty in (([6], True), ([1] * 6, False), ([2, 1, 3], True)):
        loss, again, pairs = _value_loss(PpoSpec(), split, dirty=dirty)
        assert loss == pytest.approx(expected, abs=1e-14)
        torch.testing.assert_close(again, gradient, rtol=0, atol=1e-15)
        assert pairs == sums


def test_a28_a_critics_micro_batch_with_nothing_to_train_adds_zero() -> None:
    batch, _ = reference_fixture()
    batch = batch.with_per_token(returns=torch.full((6, 6), math.nan))
    batch.loss_mask.zero_()
    values = torch.full((6, 6), math.nan, requires_grad=True)
    outputs = ValueOutputs(values=values, scores=torch.zeros(6))
    share = load_algorithm(PpoSpec()).value_loss(outputs, batch, Normalizer(tokens=9, sequences=1))
    share.loss.backward()
    assert float(share.loss.detach()) == 0.0
    assert values.grad.tolist() == torch.zeros(6, 6).tolist()
    assert share.sums == {"value_clip_fraction": (0.0, 0.0)}


def test_a25_credit_is_gae_and_what_is_masked_is_never_read() -> None:
    rollout = rollout_of([[0.0, 1.0, 0.0]], mask=[[1, 1, 0]], values=[[0.0, 0.0, math.nan]])
    spec = PpoSpec.model_validate({**NO_KL, "whiten_advantages": False})
    credit = load_algorithm(spec).advantages(rollout)
    assert credit.advantages.tolist() == [[0.0, 0.95, 1.0, 0.0]]
    assert credit.returns.tolist() == [[0.0, 0.95, 1.0, 0.0]]


def test_the_fixtures_returns_are_raw_and_its_advantages_whitened() -> None:
    batch, _ = reference_fixture()
    rows = [
        [*([0.0] * (length - 1)), reward] for length, reward in zip(LENGTHS, REWARDS, strict=True)
    ]
    values = [batch.per_token["values"][row, 1 : 1 + n].tolist() for row, n in enumerate(LENGTHS)]
    credit = load_algorithm(PpoSpec.model_validate(NO_KL)).advantages(
        rollout_of(rows, values=values)
    )
    assert credit.returns[0, 1].item() == pytest.approx(0.8707291, abs=6e-8)
    trained = credit.advantages[batch.loss_mask > 0]
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-13)
    assert float(trained.std()) == pytest.approx(1.0, abs=1e-7)


def test_the_critic_is_measured_against_what_was_earned() -> None:
    """Returns of 1, 1 and 0, values that are half of that: a quarter of the variance is left."""
    rollout = rollout_of([[0.0, 1.0], [0.0]], values=[[0.5, 0.5], [0.0]])
    metrics = load_algorithm(PpoSpec.model_validate(NO_KL)).advantages(rollout).metrics
    assert metrics["explained_variance"] == pytest.approx(0.75)
    assert metrics["return_mean"] == pytest.approx(2 / 3)
    assert metrics["value_mean"] == pytest.approx(1 / 3)
    flat = rollout_of([[0.0, 1.0], [1.0]], values=[[0.5, 0.5], [0.0]])
    metrics = load_algorithm(PpoSpec.model_validate(NO_KL)).advantages(flat).metrics
    assert "explained_variance" not in metrics


def test_a07_kl_is_taken_off_each_token_with_the_weight_of_now() -> None:
    """Weight 0.5 and k1 of 0.2 and 0.6 nats: rewards -0.1 and 1 - 0.3, lambda 1, values 0."""
    spec = PpoSpec(kl_coef=0.5, gae_lambda=1.0, whiten_advantages=False)
    rollout = rollout_of(
        [[0.0, 1.0]],
        old_log_probs=[[-1.0, -1.0]],
        reference_log_probs=[[-1.2, -1.6]],
        values=[[0.0, 0.0]],
    )
    credit = load_algorithm(spec).advantages(rollout)
    assert credit.advantages[0, 1:].tolist() == pytest.approx([0.6, 0.7])
    assert credit.metrics["reward_kl"] == pytest.approx(0.8)


def _answers(count: int, kl: float):
    return rollout_of(
        [[1.0]] * count,
        old_log_probs=[[-1.0]] * count,
        reference_log_probs=[[-1.0 - kl]] * count,
        values=[[0.0]] * count,
    )


def test_the_adaptive_weight_that_verl_and_openrlhf_agree_on() -> None:
    """0.1 -> 0.100512 with target 6, seen 9, 256 answers, horizon 10000."""
    spec = PpoSpec(kl_coef=0.1, kl_controller=AdaptiveKl())
    algorithm = load_algorithm(spec)
    first = algorithm.advantages(_answers(256, 9.0))
    second = algorithm.advantages(_answers(256, 3.0))
    third = algorithm.advantages(_answers(256, 6.3))
    assert first.metrics["kl_coef"] == 0.1
    assert second.metrics["kl_coef"] == pytest.approx(0.100512)
    assert third.metrics["kl_coef"] == pytest.approx(0.100512 * (1 - 0.00512))
    assert algorithm.state()["kl_coef"] == pytest.approx(
        0.100512 * (1 - 0.00512) * (1 + 0.05 * 0.0256)
    )


def test_more_answers_than_the_horizon_leave_the_weight_above_zero() -> None:
    spec = PpoSpec(kl_coef=0.1, kl_controller=AdaptiveKl(horizon=1))
    algorithm = load_algorithm(spec)
    for _ in range(2):
        algorithm.advantages(_answers(64, 0.0))
    assert algorithm.state()["kl_coef"] == pytest.approx(0.1 * 0.8**2)


def test_a_resumed_job_goes_on_with_the_weight_that_it_had() -> None:
    spec = PpoSpec(kl_coef=0.1, kl_controller=AdaptiveKl(horizon=100))
    algorithm = load_algorithm(spec)
    algorithm.advantages(_answers(10, 9.0))
    state = algorithm.state()
    assert state == {"kl_coef": pytest.approx(0.102)}
    resumed = load_algorithm(spec)
    resumed.restore(state)
    assert resumed.advantages(_answers(10, 9.0)).metrics["kl_coef"] == state["kl_coef"]
    resumed.restore({})  # back to the start
    assert resumed.advantages(_answers(10, 9.0)).metrics["kl_coef"] == 0.1
    fixed = load_algorithm(PpoSpec(kl_coef=0.3))
    fixed.restore(state)  # a job that goes on with another controller
    assert fixed.state() == {}
    assert fixed.advantages(_answers(10, 9.0)).metrics["kl_coef"] == 0.3


def test_a06_unscored_answers_do_not_move_the_weight() -> None:
    spec = PpoSpec(kl_coef=0.1, kl_controller=AdaptiveKl(horizon=100))
    algorithm = load_algorithm(spec)
    nan = math.nan
    algorithm.advantages(
        rollout_of(
            [[1.0], None, None],
            old_log_probs=[[-1.0], [nan], [nan]],
            reference_log_probs=[[-10.0], [nan], [nan]],
            values=[[0.0], [nan], [nan]],
        )
    )
    assert algorithm.state()["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 1 / 100))


@pytest.mark.parametrize("fields", [{"kl_coef": 0.0}, {"kl_in": "loss"}])
def test_a_controller_without_anything_to_control_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="`kl_controller` adaptive needs `kl_in: reward`"):
        PpoSpec.model_validate({"kl_controller": {"type": "adaptive"}, **fields})


def test_the_spec_names_this_class() -> None:
    assert isinstance(load_algorithm(PpoSpec()), Ppo)
