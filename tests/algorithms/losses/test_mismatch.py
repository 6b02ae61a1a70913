import math

import pytest
import torch

from algorithms.batch import Batch
from algorithms.losses.mismatch import correction_weights, rollout_mismatch
from service.spec import RolloutCorrection

RATIOS = [1.0, 4.0, 0.36787944]
"""p_old / p_rollout of three tokens; the third is exp(-1)."""


def _batch(*rows: list[float]) -> tuple[torch.Tensor, Batch]:
    """The trainer's log-probs, and a batch with the generator's; what is masked is no number."""
    length = max(map(len, rows))
    old = torch.full((len(rows), length + 2), math.nan, dtype=torch.float64)
    rollout, mask = torch.full_like(old, -math.inf), torch.zeros(len(rows), length + 2)
    for row, ratios in enumerate(rows):
        for place, ratio in enumerate(ratios, start=1):
            rollout[row, place] = -1.5
            old[row, place] = -1.5 + math.log(ratio)
            mask[row, place] = 1.0
    batch = Batch(
        tokens=torch.zeros(len(rows), length + 2, dtype=torch.int64),
        lengths=torch.full((len(rows),), length + 2),
        loss_mask=mask,
        per_token={"rollout_log_probs": rollout},
    )
    return old, batch


def _weights(rows: list[list[float]], **fields: object) -> list[list[float]]:
    old, batch = _batch(*rows)
    weights = correction_weights(old, batch, RolloutCorrection.model_validate(fields))
    assert torch.isfinite(weights).all()
    return [weights[row, 1 : 1 + len(ratios)].tolist() for row, ratios in enumerate(rows)]


def test_truncated_weights_of_tokens_are_those_of_verl() -> None:
    assert _weights([RATIOS], high=2.0) == [pytest.approx([1.0, 2.0, 0.368], abs=5e-4)]


def test_a_lower_bound_raises_what_is_below() -> None:
    assert _weights([RATIOS], high=2.0, low=0.5) == [pytest.approx([1.0, 2.0, 0.5])]


def test_masked_weights_are_zero_outside_and_untouched_inside() -> None:
    assert _weights([RATIOS], mode="mask") == [pytest.approx([1.0, 0.0, 0.36787944])]
    assert _weights([RATIOS], mode="mask", low=0.5, high=5.0) == [pytest.approx([1.0, 4.0, 0.0])]


def test_a_sequence_has_the_product_of_its_tokens_ratios() -> None:
    rows = [[1.5, 1.2], RATIOS, [4.0, 3.0]]
    whole = {"level": "sequence"}
    product = 4.0 * math.exp(-1)
    assert _weights(rows, **whole) == [
        pytest.approx([1.8] * 2),
        pytest.approx([product] * 3),
        pytest.approx([2.0] * 2),
    ]
    assert _weights(rows, **whole, mode="mask") == [
        pytest.approx([1.8] * 2),
        pytest.approx([product] * 3),
        [0.0, 0.0],
    ]


def test_extreme_ratios_stay_finite() -> None:
    old, batch = _batch([1.0])
    for distance in (900.0, -900.0):
        far = old + distance
        for level in ("token", "sequence"):
            for mode in ("truncate", "mask"):
                correction = RolloutCorrection(level=level, mode=mode)
                assert torch.isfinite(correction_weights(far, batch, correction)).all()
        assert all(math.isfinite(total) for total, _ in rollout_mismatch(far, batch).values())


def test_weights_carry_no_gradient() -> None:
    old, batch = _batch(RATIOS)
    weights = correction_weights(old.requires_grad_(), batch, RolloutCorrection())
    assert not weights.requires_grad


def test_a13_the_mismatch_of_a_first_step_by_hand() -> None:
    """The largest |ratio - 1| of each sequence; k3 of each token."""
    old, batch = _batch([1.0, 1.2], [0.5])
    found = rollout_mismatch(old, batch)
    assert found["rollout_ratio_deviation"] == (pytest.approx(0.2 + 0.5), 2.0)
    k3 = (1.2 - math.log(1.2) - 1) + (0.5 - math.log(0.5) - 1)
    assert found["rollout_kl"] == (pytest.approx(k3), 3.0)


def test_without_a_samplers_log_probs_nothing_is_said() -> None:
    old, batch = _batch(RATIOS)
    bare = Batch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask)
    assert rollout_mismatch(old, bare) == {}
