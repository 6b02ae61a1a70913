"""KTO against values of TRL and Liger, and its reference point on a real small model."""

import math
from itertools import pairwise
from typing import cast

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Normalizer
from algorithms.errors import JobFailure
from algorithms.kto import Kto, reference_point
from algorithms.protocols import Checkpoints, Workers
from algorithms.swapped_answers import answer_sources
from service.spec import KtoSpec, Reason
from tests.algorithms.answer_losses import answers, loss_of, means, prompted
from tests.algorithms.reference_fixture import DESIRABLE, KTO_REFERENCE_POINT, label_fixture
from tests.algorithms.tiny_policy import TinyPolicy, tiny_model


@pytest.mark.parametrize(
    ("fields", "value"), [({}, 0.511528), ({"desirable_weight": 1.33}, 0.5959291)]
)
def test_values_of_the_references(fields: dict[str, float], value: float) -> None:
    batch, log_probs = label_fixture()
    output = loss_of(KtoSpec(**fields), batch, log_probs)
    assert float(output.loss.detach()) == pytest.approx(value, abs=6e-8)


def test_the_references_kl_is_the_mean_log_ratio_of_whole_answers() -> None:
    batch, log_probs = label_fixture()
    log_ratios = log_probs.detach() - batch.per_token["reference_log_probs"]
    point = reference_point(log_ratios, batch.loss_mask)
    assert float(point) == pytest.approx(KTO_REFERENCE_POINT, abs=6e-8)
    assert float(reference_point(-log_ratios, batch.loss_mask)) == 0.0  # a KL is never negative
    half = batch.loss_mask.clone()
    half[3:] = 0.0
    expected = sum(float(log_ratios[row][half[row] > 0].sum()) for row in range(3)) / 3
    assert float(reference_point(log_ratios, half)) == pytest.approx(expected, abs=1e-12)
    assert float(reference_point(log_ratios, torch.zeros(6, 6))) == 0.0


def test_the_gradient_is_the_one_derived_by_hand() -> None:
    """dL/dlp = -+ w beta s (1 - s) / rows on each trained token, s = sigmoid(beta (ratio - z))."""
    batch, log_probs = label_fixture()
    spec = KtoSpec(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    loss_of(spec, batch, log_probs).loss.backward()
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for row, label in enumerate(DESIRABLE):
        trained = batch.loss_mask[row] > 0
        differences = log_probs.detach() - batch.per_token["reference_log_probs"]
        ratio = float(differences[row][trained].sum())
        s = 1 / (1 + math.exp(-0.3 * (ratio - KTO_REFERENCE_POINT)))
        expected[row][trained] = (-1.5 if label else 0.7) * 0.3 * s * (1 - s) / 6
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=1e-15)


def test_labels_may_be_booleans() -> None:
    """As rows of a file have them."""
    batch, log_probs = label_fixture()
    labels = torch.tensor(DESIRABLE) > 0
    output = loss_of(KtoSpec(), batch.with_per_sequence(desirable=labels), log_probs)
    assert float(output.loss.detach()) == pytest.approx(0.511528, abs=6e-8)


def test_metrics_of_a_batch_worked_out_by_hand() -> None:
    batch, policy = answers([-1.0, -1.0], [-4.0], [-6.0], [-9.0])
    batch.loss_mask[3] = 0.0
    batch.per_token["reference_log_probs"][:3, 1] = torch.tensor([-2.0, -3.0, -3.0])
    batch = batch.with_per_sequence(
        desirable=torch.tensor([1.0, 0.0, 0.0, 1.0]), reference_point=torch.full((4,), 0.25)
    )
    # The log-ratios are -1 - 1 + 2 = 0, -1 and -3.
    assert means(loss_of(KtoSpec(beta=0.1), batch, policy)) == pytest.approx(
        {
            "kl": 0.25,
            "reward_desirable": 0.0,
            "reward_undesirable": 0.1 * (-1.0 - 3.0) / 2,
            "log_prob_desirable": -2.0,
            "log_prob_undesirable": -5.0,
            "desirable_share": 1 / 3,
            "entropy": 1.0,
        }
    )


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 4, 5, 6), (0, 4, 6)])
def test_a01_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    cuts: tuple[int, ...],
) -> None:
    """One row is fully masked: it is counted in none of them."""
    spec = KtoSpec(undesirable_weight=1.7)
    batch, whole = label_fixture()
    batch.loss_mask[1] = 0.0
    normalizer = Normalizer.of(batch)
    expected = loss_of(spec, batch, whole, normalizer)
    expected.loss.backward()
    kept = torch.tensor([0, 2, 3, 4, 5])
    alone = loss_of(spec, batch.rows(kept), whole[kept])
    torch.testing.assert_close(alone.loss, expected.loss, rtol=1e-14, atol=0)
    _, parts = label_fixture()
    pieces = [slice(*ends) for ends in pairwise(cuts)]
    shares = [loss_of(spec, batch.rows(p), parts[p], normalizer) for p in pieces]
    total = cast(Tensor, sum(share.loss for share in shares))
    total.backward()
    torch.testing.assert_close(total, expected.loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-15)
    for name, (value, count) in expected.sums.items():
        assert sum(s.sums[name][0] for s in shares) == pytest.approx(value, abs=1e-5), name
        assert sum(s.sums[name][1] for s in shares) == count, name


def test_what_is_masked_may_be_anything_and_changes_nothing() -> None:
    batch, clean = label_fixture()
    loss_of(KtoSpec(), batch, clean).loss.backward()
    dirty_batch, dirty = label_fixture()
    masked = dirty_batch.loss_mask == 0
    with torch.no_grad():
        dirty[masked] = math.nan
    dirty_batch.per_token["reference_log_probs"][masked] = math.inf
    output = loss_of(KtoSpec(), dirty_batch, dirty)
    output.loss.backward()
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
    assert all(math.isfinite(total) for total, _ in output.sums.values())


def test_a28_a_micro_batch_with_nothing_to_train_adds_zero_to_sum_and_count() -> None:
    batch, log_probs = label_fixture()
    normalizer = Normalizer.of(batch)
    batch.loss_mask.zero_()
    output = loss_of(KtoSpec(), batch, log_probs, normalizer)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert torch.equal(log_probs.grad, torch.zeros_like(log_probs))
    assert set(output.sums.values()) == {(0.0, 0.0)}


def test_a22_a_batch_with_only_undesirable_rows_is_finite() -> None:
    batch, log_probs = label_fixture()
    batch.per_sequence["desirable"].zero_()
    output = loss_of(KtoSpec(), batch, log_probs)
    output.loss.backward()
    assert 0.0 < float(output.loss.detach()) < 1.0
    assert bool((log_probs.grad[batch.loss_mask > 0] > 0).all())  # all of them become less likely
    assert output.sums["reward_desirable"] == (0.0, 0.0)


def _workers(spec: KtoSpec) -> tuple[Workers, TinyPolicy]:
    """A policy that has moved away from its reference."""
    policy = TinyPolicy(tiny_model(100), load_algorithm(spec), stop_id=0)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    nowhere = cast(Checkpoints, None)
    return Workers(train=policy, generator=None, checkpoints=nowhere), policy


def test_a22_the_reference_point_is_that_of_the_whole_batch_on_a_real_model() -> None:
    """Each mismatched sequence alone, unpadded, through the model: the mean of their log-ratios."""
    workers, policy = _workers(KtoSpec())
    prompts = [[7, 3, 9], [5], [8, 2], [6, 6, 1, 4]]
    written = [[11, 12, 0], [13, 0], [14, 15, 16, 0], [17, 0]]
    batch = prompted(*zip(prompts, written, strict=True), width=9)
    prepared = Kto(KtoSpec()).prepare(batch, workers)

    reference = tiny_model(100)
    log_ratios = []
    for row, other in answer_sources(batch).items():
        assert row != other
        prompt, answer = prompts[row], written[other]
        ids = torch.tensor([prompt + answer])
        both = []
        for model in (policy.model, reference):
            with torch.no_grad():
                distribution = model(input_ids=ids).logits[0].double().log_softmax(-1)
            at = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
            both.append(sum(float(distribution[p, ids[0, p + 1]]) for p in at))
        log_ratios.append(both[0] - both[1])
    expected = sum(log_ratios) / 4
    assert abs(expected) > 0.05
    points = prepared.per_sequence["reference_point"]
    assert points.shape == (4,)
    assert points.tolist() == pytest.approx([max(expected, 0.0)] * 4, abs=1e-4)
    assert policy.log == ["log_probs policy", "log_probs reference"]


def test_a22_a_batch_of_one_row_is_refused_and_names_the_field() -> None:
    workers, _ = _workers(KtoSpec())
    with pytest.raises(
        JobFailure, match=r"training\.global_batch_size: KTO needs 2 rows"
    ) as failed:
        Kto(KtoSpec()).prepare(prompted(([1], [2]), width=4), workers)
    assert failed.value.reason == Reason.USER_ERROR


def test_the_spec_names_this_class() -> None:
    assert isinstance(load_algorithm(KtoSpec()), Kto)
    assert KtoSpec().keeps_reference
