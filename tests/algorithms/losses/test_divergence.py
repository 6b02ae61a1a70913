import math

import pytest
import torch

from algorithms.losses.divergence import k3


def test_a07_k3_has_the_right_sign_and_direction() -> None:
    policy = torch.tensor([math.log(0.5)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.25)], dtype=torch.float64)
    assert float(k3(policy, reference)) == pytest.approx(0.193147, abs=1e-6)
    assert float(k3(reference, policy)) == pytest.approx(0.306853, abs=1e-6)


def test_a07_the_loss_rises_as_the_policy_leaves_the_reference() -> None:
    reference = torch.tensor([-1.0])
    near, far = torch.tensor([-0.9]), torch.tensor([-0.3])
    assert 0 < k3(near, reference) < k3(far, reference)


def test_the_gradient_of_k3_is_one_minus_the_inverse_ratio() -> None:
    policy = torch.tensor([-0.4, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.5], dtype=torch.float64)
    k3(policy, reference).sum().backward()
    by_hand = 1 - torch.exp(reference - policy.detach())
    torch.testing.assert_close(policy.grad, by_hand, rtol=1e-14, atol=0)


def test_a_policy_that_is_far_off_stays_finite() -> None:
    policy = torch.tensor([-500.0], requires_grad=True)
    k3(policy, torch.tensor([0.0])).backward()
    assert torch.isfinite(policy.grad).all()
