"""Log-probs and entropies against hand-derived values and torch's own log_softmax.

An identity matrix as output layer makes hidden states the logits themselves.
"""

import math

import pytest
import torch
from torch import Tensor

from megatron_backend.training import log_probs as module
from megatron_backend.training.likeliest import likeliest
from megatron_backend.training.log_probs import Vocabulary, linear_log_probs
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.forward_runs import Largest


def of_logits(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of these very logits."""
    vocabulary = Vocabulary(size=vocab_size, temperature=temperature)
    weight = torch.eye(logits.shape[1])
    log_probs, entropy = linear_log_probs(logits, weight, targets.unsqueeze(-1), vocabulary)
    return log_probs.squeeze(-1), entropy


def reference(
    logits: Tensor, asked: Tensor, vocab_size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same from torch.log_softmax over the real columns, in double precision."""
    everything = torch.log_softmax(logits[:, :vocab_size].double() / temperature, dim=-1)
    return everything.gather(-1, asked), -(everything.exp() * everything).sum(-1)


def random_head(
    *, tokens: int = 37, width: int = 12, columns: int = 50, asked: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, an output layer, tokens that are asked for, some of them twice."""
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(columns, width, requires_grad=True)
    return hidden, weight, torch.randint(0, columns - 3, (tokens, asked))


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


@pytest.mark.parametrize("losses", ["log-probs", "entropy", "both"])
@pytest.mark.parametrize("kept", [0, 3000, 2**28])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    softcap: float | None,
    kept: int,
    losses: str,
) -> None:
    """37 tokens in chunks of 5, of which all, the first few or none keep their exponentials."""
    hidden, weight, asked = random_head()
    logits = hidden.double() @ weight.double().t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = reference(logits, asked, 47, temperature)
    of_log_probs, of_entropy = torch.randn(37, 4).double(), torch.randn(37).double()

    def loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
        total = (log_probs * of_log_probs).sum() if losses != "entropy" else 0.0
        return total + (entropy * of_entropy).sum() if losses != "log-probs" else total

    expected_gradients = gradients(loss(*expected), hidden, weight)
    monkeypatch.setattr(module, "CHUNK_BYTES", 47 * 5 * 4)
    monkeypatch.setattr(module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    vocabulary = Vocabulary(size=47, temperature=temperature, softcap=softcap)
    actual = linear_log_probs(hidden, weight, asked, vocabulary)
    for value, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=2e-6)
    for again in (True, False):  # a second pass finds nothing kept
        found = torch.autograd.grad(loss(*actual), (hidden, weight), retain_graph=again)
        torch.testing.assert_close(list(found), expected_gradients, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_an_entropy_by_hand() -> None:
    """p = 3/4 and 1/4: H = 0.562335, and dH/dy_j = -p_j (log p_j + H) = -+0.205990. A third logit
    so low that its probability is 0 adds nothing, and is no NaN."""
    logits = torch.tensor([[math.log(3.0), 0.0, -200.0]], requires_grad=True)
    _, entropy = of_logits(logits, torch.tensor([0]), vocab_size=3)
    (found,) = gradients(entropy.sum(), logits)
    assert entropy.item() == pytest.approx(0.562335, abs=1e-6)
    torch.testing.assert_close(found, torch.tensor([[-0.205990, 0.205990, 0.0]]), rtol=0, atol=1e-6)


def test_an_entropy_that_no_loss_reads_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, asked = random_head()

    def no(*_: object) -> Tensor:
        raise AssertionError("p log p was computed")

    monkeypatch.setattr(torch.special, "entr", no)
    log_probs, entropy = linear_log_probs(hidden, weight, asked, Vocabulary(size=47))
    gradients((log_probs * entropy.detach().unsqueeze(-1)).sum(), hidden, weight)


def test_no_matrix_of_tokens_and_vocabulary_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, asked = random_head(tokens=400, width=8, columns=500)
    monkeypatch.setattr(module, "CHUNK_BYTES", 500 * 64 * 4)
    with Largest() as plain:
        reference(hidden @ weight.t(), asked, 500, 1.0)[0].sum().backward()
    assert plain.elements == 400 * 500
    with Largest() as chunked:
        log_probs, entropy = linear_log_probs(hidden, weight, asked, Vocabulary(size=500))
        (log_probs.sum() + entropy.sum()).backward()
        likeliest(hidden, weight, 7, Vocabulary(size=500))
    assert chunked.elements <= 500 * 64


def test_no_tokens_give_no_gradient_but_a_graph() -> None:
    hidden, weight, asked = random_head(tokens=0)
    log_probs, entropy = linear_log_probs(hidden, weight, asked, Vocabulary(size=47))
    assert log_probs.shape == (0, 4)
    assert entropy.shape == (0,)
    found = gradients(log_probs.sum() + entropy.sum(), hidden, weight)
    assert not any(gradient.any() for gradient in found)
    ids, _ = likeliest(hidden, weight, 3, Vocabulary(size=47))
    assert ids.shape == (0, 3)


@pytest.mark.parametrize("count", [1, 5, 47, 60])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_likeliest_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, count: int
) -> None:
    """Of 47 real columns of 50, in chunks of 5 tokens."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 47 * 5 * 4)
    monkeypatch.setattr(module, "_LEAST_ROWS", 1)
    hidden, weight, _ = random_head()
    logits = hidden.double() @ weight.double().t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    exact = torch.log_softmax(logits[:, :47] / 0.7, dim=-1)
    expected, places = exact.sort(-1, descending=True)
    ids, log_probs = likeliest(
        hidden, weight, count, Vocabulary(size=47, temperature=0.7, softcap=softcap)
    )
    kept = min(count, 47)
    assert torch.equal(ids, places[:, :kept])
    torch.testing.assert_close(log_probs.double(), expected[:, :kept], rtol=1e-6, atol=2e-6)
    assert not log_probs.requires_grad


def test_of_tokens_equally_likely_the_lower_id_comes_first() -> None:
    """Also between negative logits, and between 0 and -0, whose bits are not the same."""
    logits = torch.tensor(
        [
            [1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
            [-3.0, -2.0, -2.0, -3.0, -2.0, -2.5],
            [-0.0, 0.0, -0.0, 0.0, -1.0, 1e-30],
        ]
    )
    ids, log_probs = likeliest(logits, torch.eye(6), 4, Vocabulary(size=6))
    assert ids.tolist() == [[1, 3, 5, 0], [1, 2, 4, 5], [5, 0, 1, 2]]
    exact = torch.log_softmax(logits, dim=-1).gather(-1, ids)
    torch.testing.assert_close(log_probs, exact, rtol=0, atol=1e-6)


def split_log_probs(
    _rank: int, hidden: Tensor, weights: list[Tensor], asked: list[Tensor], sizes: list[int]
) -> list[tuple[Tensor, ...]]:
    """Log-probs, entropy, this rank's share of hidden states' gradient, its rows' gradient, the
    five likeliest tokens and their log-probs."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    results = []
    for weight, tokens, size in zip(weights, asked, sizes, strict=True):
        read = hidden.clone().requires_grad_()
        mine = weight.chunk(2)[group.rank()].clone().requires_grad_()
        vocabulary = Vocabulary(size=size, temperature=0.8, group=group)
        log_probs, entropy = linear_log_probs(read, mine, tokens, vocabulary)
        found = gradients(weighed(log_probs, entropy), read, mine)
        best = likeliest(read, mine, 5, vocabulary)
        results.append((log_probs.detach(), entropy.detach(), *found, *best))
    return results


def weighed(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """A loss to which every value matters otherwise."""
    rows, columns = log_probs.shape
    weights = torch.arange(rows * columns).view(rows, columns) / 7 - 1
    return (log_probs * weights).sum() + (entropy * weights[:, 0]).sum()


def test_a_split_vocabulary_gives_the_same_e06(ranks: Ranks) -> None:
    """With 3 real columns of 10 the second rank has none at all; 50,257 are GPT-2's."""
    torch.manual_seed(1)
    sizes = [3, 7, 8, 10, 50_257]
    hidden = 4 * torch.randn(6, 16)
    weights = [torch.randn(10 if size <= 10 else 50_432, 16) for size in sizes]
    asked = [torch.randint(0, size, (6, 3)) for size in sizes]
    parts = ranks.run(Layout(tp=2), split_log_probs, hidden, weights, asked, sizes)
    for weight, tokens, size, one, two in zip(weights, asked, sizes, *parts, strict=True):
        read, whole = (t.double().requires_grad_() for t in (hidden, weight))
        logits = read @ whole.t()
        expected = reference(logits, tokens, size, 0.8)
        grad_hidden, grad_weight = (g.float() for g in gradients(weighed(*expected), read, whole))
        best, ids = torch.log_softmax(logits[:, :size] / 0.8, -1).sort(-1, descending=True)
        for log_probs, entropy, _, _, found, its_log_probs in (one, two):
            torch.testing.assert_close(log_probs.double(), expected[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
            assert torch.equal(found, ids[:, :5])
            torch.testing.assert_close(its_log_probs.double(), best[:, :5], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one[2] + two[2], grad_hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([one[3], two[3]]), grad_weight, rtol=1e-4, atol=1e-5)


def split_ties(_rank: int, logits: Tensor, count: int) -> Tensor:
    """The likeliest of logits that are split over the ranks."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    mine = torch.eye(logits.shape[1]).chunk(group.size())[group.rank()]
    return likeliest(logits, mine, count, Vocabulary(size=logits.shape[1], group=group))[0]


def test_ties_between_ranks_are_decided_as_on_one(ranks: Ranks) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 0.0], [0.0] * 8])
    for ids in ranks.run(Layout(tp=2), split_ties, logits, 6):
        assert ids.tolist() == [[1, 3, 5, 6, 0, 2], [0, 1, 2, 3, 4, 5]]


def test_log_probs_of_bfloat16_are_float32() -> None:
    hidden, weight, asked = random_head()
    small = hidden.detach().bfloat16().requires_grad_()
    log_probs, _ = linear_log_probs(small, weight.bfloat16(), asked, Vocabulary(size=47))
    exact, _ = linear_log_probs(hidden, weight, asked, Vocabulary(size=47))
    torch.testing.assert_close(log_probs, exact, rtol=0.05, atol=0.05)
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert small.grad is not None
    assert small.grad.dtype == torch.bfloat16
