"""Runs a loss on whole answers as a rank would, on numbers that a test gives."""

import torch
from torch import Tensor

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, PolicyOutputs, ValueOutputs
from service.spec import AlgorithmSpec


def loss_of(
    spec: AlgorithmSpec, batch: Batch, numbers: Tensor, normalizer: Normalizer | None = None
) -> LossOutput:
    """The loss where the model says `numbers` [B, T]: log-probs, or one number a token, of which
    the last one is the answer's score."""
    rows = torch.arange(len(batch))
    said = (
        ValueOutputs(values=numbers, scores=numbers[rows, batch.lengths - 1])
        if spec.head == "value"
        else PolicyOutputs(log_probs=numbers, entropy=torch.ones_like(numbers))
    )
    return load_algorithm(spec).loss(said, batch, normalizer or Normalizer.of(batch))


def means(output: LossOutput) -> dict[str, float]:
    """The metrics that are counted at least once."""
    return {name: total / count for name, (total, count) in output.sums.items() if count}


def answers(*rows: list[float], unit: int = 1) -> tuple[Batch, Tensor]:
    """One sequence for each list of log-probs, fp64: a token of prompt, then the answer's."""
    width = 1 + max(map(len, rows))
    numbers = torch.zeros(len(rows), width, dtype=torch.float64)
    mask = torch.zeros(len(rows), width)
    for row, log_probs in enumerate(rows):
        numbers[row, 1 : 1 + len(log_probs)] = torch.tensor(log_probs, dtype=torch.float64)
        mask[row, 1 : 1 + len(log_probs)] = 1.0
    batch = Batch(
        tokens=torch.zeros(len(rows), width, dtype=torch.int64),
        lengths=torch.tensor([1 + len(row) for row in rows]),
        loss_mask=mask,
        per_token={"reference_log_probs": torch.zeros(len(rows), width, dtype=torch.float64)},
        unit=unit,
    )
    return batch, numbers.requires_grad_()


def prompted(*rows: tuple[list[int], list[int]], width: int) -> Batch:
    """A prompt and an answer for each row; an empty answer leaves nothing to train."""
    tokens, mask = torch.full((len(rows), width), 99), torch.zeros(len(rows), width)
    for i, (prompt, answer) in enumerate(rows):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[i, len(prompt) : len(prompt) + len(answer)] = 1.0
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    return Batch(tokens=tokens, lengths=lengths, loss_mask=mask)
