"""Our Adam against torch's."""

import pytest
import torch

from megatron_backend.training.adam import GroupStepAdam


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch(weight_decay: float) -> None:
    torch.manual_seed(0)
    start = [torch.randn(3, 4), torch.randn(5)]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    ours = [tensor.clone().requires_grad_() for tensor in start]
    theirs = [tensor.clone().requires_grad_() for tensor in start]
    our_adam = GroupStepAdam(ours, **options)
    torch_adam = torch.optim.AdamW(theirs, **options)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        our_adam.step()
        torch_adam.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert our_adam.param_groups[0]["step"] == 5


def test_parameters_without_gradient_stay() -> None:
    parameter = torch.ones(2, requires_grad=True)
    GroupStepAdam([parameter], lr=1.0, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.5).step()
    assert torch.equal(parameter, torch.ones(2))


def test_modes_that_it_has_not_are_refused() -> None:
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    with pytest.raises(ValueError, match="decouples weight decay"):
        GroupStepAdam([torch.ones(1)], adam_w_mode=False, **options)
    with pytest.raises(ValueError, match="no closure"):
        GroupStepAdam([torch.ones(1)], **options).step(lambda: 0.0)
