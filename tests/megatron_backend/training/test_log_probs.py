"""Log-probs and entropies against hand-derived values and torch's own log_softmax."""

import math

import pytest
import torch
from torch import Tensor

from megatron_backend.training.log_probs import vocabulary_log_probs
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks


def reference(
    logits: Tensor, targets: Tensor, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same from torch.log_softmax over the real columns."""
    everything = torch.log_softmax(logits[..., :vocab_size].double() / temperature, dim=-1)
    chosen = everything.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen.float(), -(everything.exp() * everything).sum(-1).float()


def split_log_probs(
    rank: int, logits: Tensor, targets: Tensor, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and the gradient of this rank's columns."""
    from megatron.core import parallel_state

    mine = logits.chunk(2, dim=-1)[rank].clone().requires_grad_()
    log_probs, entropy = vocabulary_log_probs(
        mine,
        targets,
        vocab_size=vocab_size,
        temperature=temperature,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    (log_probs * torch.arange(1, targets.numel() + 1).view_as(targets)).sum().backward()
    assert mine.grad is not None
    return log_probs.detach(), entropy, mine.grad


def test_temperature_divides_the_logits_a15() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    log_probs, _ = vocabulary_log_probs(logits, torch.tensor([1]), vocab_size=2, temperature=0.5)
    assert log_probs.item() == pytest.approx(-0.105361, abs=1e-6)


def test_padded_columns_are_left_out_e06() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 50.0]])
    log_probs, entropy = vocabulary_log_probs(logits, torch.tensor([2]), vocab_size=3)
    assert -log_probs.item() == pytest.approx(1.098612, abs=1e-6)
    assert entropy.item() == pytest.approx(1.098612, abs=1e-6)


def test_logits_stay_as_they_were_e14() -> None:
    logits = torch.zeros(2, 4)
    before = logits.clone()
    log_probs, entropy = vocabulary_log_probs(logits, torch.tensor([0, 3]), vocab_size=4)
    _, entropy_again = vocabulary_log_probs(logits, torch.tensor([1, 2]), vocab_size=4)
    assert torch.equal(logits, before)
    for value in (-log_probs, entropy, entropy_again):
        torch.testing.assert_close(value, torch.full((2,), 1.386294))
    assert not entropy.requires_grad


def test_gradient_equals_the_numerical_one() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, requires_grad=True)
    targets = torch.tensor([0, 2, 3])
    vocabulary_log_probs(logits, targets, vocab_size=4, temperature=0.7)[0].sum().backward()
    other = logits.detach().clone().requires_grad_()
    reference(other, targets, 4, 0.7)[0].sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, other.grad)
    assert not logits.grad[:, 4].any()


@pytest.mark.parametrize("vocab_size", [3, 7, 8, 10])
def test_a_split_vocabulary_gives_the_same_e06(ranks: Ranks, vocab_size: int) -> None:
    """With 3 real columns of 10 the second rank has none at all."""
    torch.manual_seed(vocab_size)
    logits = 4 * torch.randn(4, 3, 10) + 100
    targets = torch.randint(0, vocab_size, (4, 3))
    whole = logits.clone().requires_grad_()
    expected = reference(whole, targets, vocab_size, 0.8)
    (expected[0] * torch.arange(1, 13).view(4, 3)).sum().backward()
    parts = ranks.run(Layout(tp=2), split_log_probs, logits, targets, vocab_size, 0.8)
    for log_probs, entropy, _ in parts:
        torch.testing.assert_close(log_probs, expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, expected[1], rtol=1e-5, atol=1e-5)
    assert whole.grad is not None
    gradient = torch.cat([part[2] for part in parts], dim=-1)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-4, atol=1e-5)


def test_log_probs_of_bfloat16_logits_are_float32() -> None:
    logits = torch.randn(2, 6, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = vocabulary_log_probs(logits, torch.tensor([1, 2]), vocab_size=6)
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
