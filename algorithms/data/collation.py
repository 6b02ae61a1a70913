"""Ragged sequences as one padded batch."""

from collections.abc import Sequence

import torch

from algorithms.batch import Batch
from algorithms.data.dataset import Example

LENGTH_MULTIPLE = 8
"""Padded lengths are rounded up to this, so that few shapes occur."""


def padded_length(longest: int, max_length: int) -> int:
    """The longest sequence rounded up, but not beyond the model's bound."""
    rounded = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return max(longest, min(rounded, max_length))


def collate(examples: Sequence[Example], *, padding_id: int, max_length: int) -> Batch:
    """B examples as [B, T] tensors, padded on the right."""
    lengths = torch.tensor([len(example.tokens) for example in examples])
    width = padded_length(int(lengths.max()), max_length)
    tokens = torch.full((len(examples), width), padding_id, dtype=torch.int64)
    loss_mask = torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        loss_mask[row, : len(example.trained)] = example.trained
    # Nothing predicts a sequence's first token; truncation on the left can leave it trained.
    loss_mask[:, 0] = 0.0
    return Batch(tokens=tokens, lengths=lengths, loss_mask=loss_mask)
