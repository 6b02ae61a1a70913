import pytest
import torch

from algorithms.losses.value import value_loss
from tests.algorithms.reference_fixture import reference_fixture


@pytest.mark.parametrize(
    ("new", "old", "target", "clip", "loss", "gradient"),
    [
        (2.0, 1.0, 3.0, 0.2, 1.62, 0.0),  # 0.5 max((2 - 3)^2, (1.2 - 3)^2)
        (2.0, 1.0, 3.0, None, 0.5, -1.0),
        (2.0, 1.0, 0.0, 0.2, 2.0, 2.0),  # too far, and away from the target: it may come back
        (1.1, 1.0, 3.0, 0.2, 0.5 * 1.9**2, -1.9),
        (0.0, 1.0, -3.0, 0.2, 0.5 * 3.8**2, 0.0),
    ],
)
def test_a24_the_larger_error_against_the_old_value(
    new: float, old: float, target: float, clip: float | None, loss: float, gradient: float
) -> None:
    value = torch.tensor([[new]], dtype=torch.float64, requires_grad=True)
    losses, clipped = value_loss(value, torch.tensor([[old]]), torch.tensor([[target]]), clip=clip)
    losses.sum().backward()
    assert float(losses.detach()) == pytest.approx(loss)
    assert float(value.grad) == pytest.approx(gradient)
    assert float(clipped) == (gradient == 0.0)


@pytest.mark.parametrize(("clip", "expected"), [(0.2, 0.8361672), (0.5, 0.8214888)])
def test_values_that_verl_and_openrlhf_agree_on(clip: float, expected: float) -> None:
    """On the fixture, with returns = values + advantages."""
    batch, _ = reference_fixture()
    of, mask = batch.per_token, batch.loss_mask
    losses, _ = value_loss(
        of["predicted_values"], of["values"], of["values"] + of["advantages"], clip=clip
    )
    assert float((losses * mask).sum() / mask.sum()) == pytest.approx(expected, abs=6e-8)
