"""Log-probs and entropies against hand-derived values and torch's own log_softmax.

An identity matrix as output layer makes hidden states the logits themselves.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_backend.training import log_probs as module
from megatron_backend.training.log_probs import Vocabulary, linear_log_probs
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks


def of_logits(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of these very logits."""
    vocabulary = Vocabulary(size=vocab_size, temperature=temperature)
    return linear_log_probs(logits, torch.eye(logits.shape[1]), targets, vocabulary)


def reference(
    logits: Tensor, targets: Tensor, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same from torch.log_softmax over the real columns."""
    everything = torch.log_softmax(logits[:, :vocab_size].double() / temperature, dim=-1)
    chosen = everything.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen.float(), -(everything.exp() * everything).sum(-1).float()


def random_head(
    *, tokens: int = 37, width: int = 12, columns: int = 50
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an output layer, targets."""
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(columns, width, requires_grad=True)
    return hidden, weight, torch.randint(0, columns - 3, (tokens,))


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def test_temperature_divides_the_logits_a15() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    log_probs, _ = of_logits(logits, torch.tensor([1]), vocab_size=2, temperature=0.5)
    assert log_probs.item() == pytest.approx(-0.105361, abs=1e-6)


def test_padded_columns_are_left_out_e06() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 50.0]])
    log_probs, entropy = of_logits(logits, torch.tensor([2]), vocab_size=3)
    assert -log_probs.item() == pytest.approx(1.098612, abs=1e-6)
    assert entropy.item() == pytest.approx(1.098612, abs=1e-6)


def test_what_is_read_stays_as_it_was_e14() -> None:
    logits = torch.zeros(2, 4, requires_grad=True)
    log_probs, entropy = of_logits(logits, torch.tensor([0, 3]), vocab_size=4)
    _, entropy_again = of_logits(logits, torch.tensor([1, 2]), vocab_size=4)
    log_probs.sum().backward()
    assert not logits.any()
    for value in (-log_probs, entropy, entropy_again):
        torch.testing.assert_close(value, torch.full((2,), 1.386294))
    assert not entropy.requires_grad


@pytest.mark.parametrize("kept", [0, 3000, 2**28])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_whole(
    monkeypatch: pytest.MonkeyPatch, temperature: float, softcap: float | None, kept: int
) -> None:
    """37 tokens in chunks of 5, of which all, the first few or none keep their exponentials."""
    hidden, weight, targets = random_head()
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = reference(logits, targets, 47, temperature)
    weights = torch.randn(37)
    expected_gradients = gradients((expected[0] * weights).sum(), hidden, weight)
    monkeypatch.setattr(module, "CHUNK_BYTES", 47 * 5 * 4)
    monkeypatch.setattr(module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    vocabulary = Vocabulary(size=47, temperature=temperature, softcap=softcap)
    actual = linear_log_probs(hidden, weight, targets, vocabulary)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    loss = (actual[0] * weights).sum()
    for again in (True, False):  # a second pass finds nothing kept
        found = torch.autograd.grad(loss, (hidden, weight), retain_graph=again)
        torch.testing.assert_close(list(found), expected_gradients, rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_matrix_of_tokens_and_vocabulary_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = random_head(tokens=400, width=8, columns=500)
    monkeypatch.setattr(module, "CHUNK_BYTES", 500 * 64 * 4)
    with Largest() as plain:
        reference(hidden @ weight.t(), targets, 500, 1.0)[0].sum().backward()
    assert plain.elements == 400 * 500
    with Largest() as chunked:
        linear_log_probs(hidden, weight, targets, Vocabulary(size=500))[0].sum().backward()
    assert chunked.elements <= 500 * 64


def test_no_tokens_give_no_gradient_but_a_graph() -> None:
    hidden, weight, targets = random_head(tokens=0)
    log_probs, entropy = linear_log_probs(hidden, weight, targets, Vocabulary(size=47))
    assert log_probs.shape == entropy.shape == (0,)
    found = gradients(log_probs.sum(), hidden, weight)
    assert not any(gradient.any() for gradient in found)


def split_log_probs(
    _rank: int, hidden: Tensor, weights: list[Tensor], targets: list[Tensor], sizes: list[int]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Log-probs, entropy, this rank's share of hidden states' gradient, its rows' gradient."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    results = []
    for weight, target, size in zip(weights, targets, sizes, strict=True):
        read = hidden.clone().requires_grad_()
        mine = weight.chunk(2)[group.rank()].clone().requires_grad_()
        vocabulary = Vocabulary(size=size, temperature=0.8, group=group)
        log_probs, entropy = linear_log_probs(read, mine, target, vocabulary)
        found = gradients((log_probs * torch.arange(1, len(target) + 1)).sum(), read, mine)
        results.append((log_probs.detach(), entropy, *found))
    return results


def test_a_split_vocabulary_gives_the_same_e06(ranks: Ranks) -> None:
    """With 3 real columns of 10 the second rank has none at all; 50,257 are GPT-2's."""
    torch.manual_seed(1)
    sizes = [3, 7, 8, 10, 50_257]
    hidden = 4 * torch.randn(6, 16)
    weights = [torch.randn(10 if size <= 10 else 50_432, 16) for size in sizes]
    targets = [torch.randint(0, size, (6,)) for size in sizes]
    parts = ranks.run(Layout(tp=2), split_log_probs, hidden, weights, targets, sizes)
    for weight, target, size, one, two in zip(weights, targets, sizes, *parts, strict=True):
        read, whole = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        expected = reference(read @ whole.t(), target, size, 0.8)
        grad_hidden, grad_weight = gradients((expected[0] * torch.arange(1, 7)).sum(), read, whole)
        for log_probs, entropy, _, _ in (one, two):
            torch.testing.assert_close(log_probs, expected[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropy, expected[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one[2] + two[2], grad_hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([one[3], two[3]]), grad_weight, rtol=1e-4, atol=1e-5)


def test_log_probs_of_bfloat16_are_float32() -> None:
    hidden, weight, targets = random_head()
    small = hidden.detach().bfloat16().requires_grad_()
    log_probs, _ = linear_log_probs(small, weight.bfloat16(), targets, Vocabulary(size=47))
    exact, _ = linear_log_probs(hidden, weight, targets, Vocabulary(size=47))
    torch.testing.assert_close(log_probs, exact, rtol=0.05, atol=0.05)
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert small.grad is not None
    assert small.grad.dtype == torch.bfloat16
