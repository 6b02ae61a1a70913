"""What holds for every loss on pairs."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from algorithms.batch import Batch, Normalizer
from service.spec import AlgorithmSpec, DpoSpec, OrpoSpec, RewardModelSpec, SimpoSpec
from tests.algorithms.answer_losses import loss_of
from tests.algorithms.reference_fixture import pair_fixture

SPECS: dict[str, AlgorithmSpec] = {
    "reward_model": RewardModelSpec(center_coef=0.05),
    "dpo": DpoSpec(),
    "cdpo": DpoSpec(label_smoothing=0.1, nll_coef=0.3),
    "ipo": DpoSpec(loss="ipo", length_normalized=True),
    "hinge": DpoSpec(loss="hinge"),
    "robust": DpoSpec(loss="robust", label_smoothing=0.2),
    "simpo": SimpoSpec(nll_coef=0.2),
    "orpo": OrpoSpec(),
}

every_loss = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def _many_pairs() -> tuple[Batch, Tensor]:
    """Twelve rows of 1 to 7 tokens and margins; nothing of the chosen answer of pair 1, and of the
    rejected one of pair 4, is trained."""
    generator = torch.Generator().manual_seed(11)
    shape, lengths = (12, 8), torch.tensor([5, 2, 8, 3, 4, 4, 7, 2, 3, 6, 2, 8])
    places = torch.arange(8)
    mask = ((places > 0) & (places < lengths[:, None])).float()
    mask[[2, 9]] = 0.0
    numbers = -3.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.05
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    batch = Batch(
        tokens=torch.zeros(shape, dtype=torch.int64),
        lengths=lengths,
        loss_mask=mask,
        per_token={"reference_log_probs": numbers + 0.6 * noise},
        per_sequence={"margin": torch.linspace(0.0, 1.1, 12, dtype=torch.float64)},
        unit=2,
    )
    return batch, numbers.requires_grad_()


@every_loss
@pytest.mark.parametrize("cuts", [(0, 2, 4, 6, 8, 10, 12), (0, 4, 12), (0, 2, 10, 12)])
def test_a01_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    spec: AlgorithmSpec, cuts: tuple[int, ...]
) -> None:
    batch, whole = _many_pairs()
    normalizer = Normalizer.of(batch)
    assert normalizer.units == 4.0
    expected = loss_of(spec, batch, whole, normalizer)
    expected.loss.backward()
    _, parts = _many_pairs()
    pieces = [slice(*ends) for ends in pairwise(cuts)]
    shares = [loss_of(spec, batch.rows(p), parts[p], normalizer) for p in pieces]
    total = sum(share.loss for share in shares)
    total.backward()
    torch.testing.assert_close(total, expected.loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-14)
    for name, (value, count) in expected.sums.items():
        assert sum(s.sums[name][0] for s in shares) == pytest.approx(value, abs=1e-5), name
        assert sum(s.sums[name][1] for s in shares) == count, name


@every_loss
def test_a20_a_pair_with_an_empty_answer_is_left_out_and_not_counted(spec: AlgorithmSpec) -> None:
    batch, numbers = _many_pairs()
    kept = torch.tensor([0, 1, 4, 5, 6, 7, 10, 11])  # without pairs 1 and 4
    output = loss_of(spec, batch, numbers)
    alone = loss_of(spec, batch.rows(kept), numbers[kept])
    torch.testing.assert_close(output.loss, alone.loss, rtol=0, atol=1e-14)
    assert output.sums["reward_margin"] == pytest.approx(alone.sums["reward_margin"])
    assert output.sums["pairs_left_out"] == (2.0, 6.0)
    output.loss.backward()
    assert numbers.grad[[2, 3, 8, 9]].abs().sum() == 0.0
    assert (spec is SPECS["hinge"]) or bool((numbers.grad[kept].abs().sum(dim=1) > 0).all())


@every_loss
def test_a28_a_micro_batch_with_nothing_to_train_adds_zero(spec: AlgorithmSpec) -> None:
    batch, numbers = _many_pairs()
    normalizer = Normalizer.of(batch)
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    output = loss_of(spec, empty, numbers, normalizer)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert torch.equal(numbers.grad, torch.zeros_like(numbers))
    assert set(output.sums.values()) == {(0.0, 0.0)}


@every_loss
def test_what_is_masked_may_be_anything_and_changes_nothing(spec: AlgorithmSpec) -> None:
    batch, clean = _many_pairs()
    loss_of(spec, batch, clean).loss.backward()
    dirty_batch, dirty = _many_pairs()
    masked = dirty_batch.loss_mask == 0
    with torch.no_grad():
        dirty[masked] = math.nan
    dirty_batch.per_token["reference_log_probs"][masked] = math.inf
    output = loss_of(spec, dirty_batch, dirty)
    output.loss.backward()
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
    assert all(math.isfinite(total) for total, _ in output.sums.values())


@every_loss
def test_neither_the_order_of_pairs_nor_padding_matters(spec: AlgorithmSpec) -> None:
    batch, numbers = _many_pairs()
    expected = loss_of(spec, batch, numbers).loss
    order = torch.tensor([10, 11, 4, 5, 0, 1, 8, 9, 6, 7, 2, 3])

    def wider(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor[order], (0, 3), value=-7)

    moved = Batch(
        tokens=wider(batch.tokens),
        lengths=batch.lengths[order],
        loss_mask=wider(batch.loss_mask).clamp(min=0.0),
        per_token={"reference_log_probs": wider(batch.per_token["reference_log_probs"])},
        per_sequence={"margin": batch.per_sequence["margin"][order]},
        unit=2,
    )
    torch.testing.assert_close(
        loss_of(spec, moved, wider(numbers)).loss, expected, rtol=1e-13, atol=0
    )


@every_loss
def test_extreme_numbers_are_finite_in_float32_too(spec: AlgorithmSpec) -> None:
    batch, _ = pair_fixture(torch.float32)
    numbers = torch.tensor([-1e4, 0.0, 0.0, -1e4, -1e4, -1e4]).unsqueeze(1).repeat(1, 6)
    numbers.requires_grad_()
    output = loss_of(spec, batch, numbers)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert bool(output.loss.isfinite())
    assert bool(numbers.grad.isfinite().all())
    assert all(math.isfinite(total) for total, _ in output.sums.values())


@every_loss
def test_a10_every_trained_token_has_a_gradient_and_nothing_else_has(spec: AlgorithmSpec) -> None:
    """A reward model's score is read off the last token alone."""
    batch, numbers = pair_fixture()
    loss_of(spec, batch, numbers).loss.backward()
    reached = batch.loss_mask > 0
    if spec.head == "value":
        reached = torch.arange(6) == batch.lengths[:, None] - 1
    assert torch.equal(numbers.grad != 0, reached)


def test_a_batch_that_is_not_made_of_pairs_is_refused() -> None:
    batch, numbers = pair_fixture()
    with pytest.raises(ValueError, match="1 rows a unit, not 2"):
        loss_of(DpoSpec(), replace(batch, unit=1), numbers)


def test_a_tie_is_not_right() -> None:
    """Policy and reference are the same at a job's start: no answer is preferred yet."""
    batch, numbers = pair_fixture()
    batch.per_token["reference_log_probs"].copy_(numbers.detach())
    output = loss_of(DpoSpec(), batch, numbers)
    assert float(output.loss.detach()) == pytest.approx(math.log(2.0), abs=1e-12)
    assert output.sums["reward_accuracy"] == (0.0, 3.0)
