import math

import pytest
import torch

from algorithms.losses.divergence import estimate_kl


def test_a07_estimates_have_the_right_sign_and_direction() -> None:
    policy = torch.tensor([math.log(0.5)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.25)], dtype=torch.float64)
    for estimator, value in (("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)):
        assert float(estimate_kl(policy, reference, estimator)) == pytest.approx(value, abs=1e-6)
    assert float(estimate_kl(reference, policy, "k3")) == pytest.approx(0.306853, abs=1e-6)


def test_a07_the_loss_rises_as_the_policy_leaves_the_reference() -> None:
    reference = torch.tensor([-1.0])
    near, far = torch.tensor([-0.9]), torch.tensor([-0.3])
    assert 0 < estimate_kl(near, reference, "k3") < estimate_kl(far, reference, "k3")


def test_the_gradient_of_k3_is_one_minus_the_inverse_ratio() -> None:
    policy = torch.tensor([-0.4, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.5], dtype=torch.float64)
    estimate_kl(policy, reference, "k3").sum().backward()
    by_hand = 1 - torch.exp(reference - policy.detach())
    torch.testing.assert_close(policy.grad, by_hand, rtol=1e-14, atol=0)


def test_a_policy_that_is_far_off_stays_finite() -> None:
    policy = torch.tensor([-500.0], requires_grad=True)
    estimate_kl(policy, torch.tensor([0.0]), "k3").backward()
    assert torch.isfinite(policy.grad).all()
