import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer, PolicyOutputs
from algorithms.data.collation import collate
from algorithms.data.examples import Example
from algorithms.sft import Sft
from service.spec import SftSpec


def _outputs(logits: torch.Tensor, batch: Batch) -> PolicyOutputs:
    """Log-probs of each token from the logits one place before it, written out plainly."""
    log_probs = torch.zeros(batch.tokens.shape)
    rows = []
    for b in range(len(batch)):
        row = [log_probs[b, 0]]
        row += [
            logits[b, i - 1].log_softmax(-1)[batch.tokens[b, i]]
            for i in range(1, batch.tokens.shape[1])
        ]
        rows.append(torch.stack(row))
    stacked = torch.stack(rows)
    return PolicyOutputs(log_probs=stacked, entropy=torch.ones_like(stacked.detach()))


def test_a10_every_answer_token_is_trained_and_the_first_one_too() -> None:
    example = Example(
        tokens=torch.tensor([7, 11, 12, 13, 2], dtype=torch.int32),
        trained=torch.tensor([0, 1, 1, 1, 1], dtype=torch.uint8),
    )
    batch = collate([example], padding_id=0, max_length=5)
    assert batch.tokens[0][batch.loss_mask[0] > 0].tolist() == [11, 12, 13, 2]
    logits = torch.zeros(1, 5, 16, requires_grad=True)
    output = Sft(SftSpec()).loss(_outputs(logits, batch), batch, Normalizer.of(batch))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(math.log(16), abs=1e-6)
    assert logits.grad[0, 0].abs().sum() > 0  # the place that predicts 11
    assert logits.grad[0, 4].abs().sum() == 0  # nothing follows the end


def test_the_gradient_is_softmax_minus_one_hot_over_the_global_count() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 4, 6, generator=generator).requires_grad_()
    batch = Batch(
        tokens=torch.tensor([[1, 2, 3, 0], [4, 5, 1, 2]]),
        lengths=torch.tensor([3, 4]),
        loss_mask=torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]),
    )
    normalizer = Normalizer(tokens=40, sequences=8)  # this is a micro-batch of a larger step
    Sft(SftSpec()).loss(_outputs(logits, batch), batch, normalizer).loss.backward()
    expected = torch.zeros_like(logits)
    for b, i in ((0, 1), (0, 2), (1, 2), (1, 3)):
        row = logits.detach()[b, i - 1].softmax(-1)
        row[batch.tokens[b, i]] -= 1.0
        expected[b, i - 1] = row / 40
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-8)


def test_a28_a_row_with_nothing_to_train_is_finite() -> None:
    batch = Batch(
        tokens=torch.tensor([[1, 2]]), lengths=torch.tensor([2]), loss_mask=torch.zeros(1, 2)
    )
    logits = torch.zeros(1, 2, 4, requires_grad=True)
    output = Sft(SftSpec()).loss(_outputs(logits, batch), batch, Normalizer.of(batch))
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert output.sums["entropy"] == (0.0, 0.0)


def test_it_has_no_advantages() -> None:
    algorithm = load_algorithm(SftSpec())
    assert isinstance(algorithm, Sft)
    with pytest.raises(TypeError, match="no advantages"):
        algorithm.advantages(None)
