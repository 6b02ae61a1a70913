"""Ragged sequences as one padded batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.batch import Batch
from algorithms.data.examples import Item, LabelledExample, Pair, sequences_of

LENGTH_MULTIPLE = 8
"""Padded lengths are rounded up to this, so that few shapes occur."""


def padded_length(longest: int, max_length: int) -> int:
    """The longest sequence rounded up, but not beyond the model's bound."""
    rounded = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return max(longest, min(rounded, max_length))


def collate(items: Sequence[Item], *, padding_id: int, max_length: int) -> Batch:
    """Rows of one kind as [B, T] tensors, padded on the right.

    A pair is two sequences: row 2i of the batch is chosen, 2i + 1 rejected, and both have the
    pair's `margin` (float32). Labelled answers have `desirable` (bool).
    """
    examples = [example for item in items for example in sequences_of(item)]
    lengths = torch.tensor([len(example.tokens) for example in examples])
    width = padded_length(int(lengths.max()), max_length)
    tokens = torch.full((len(examples), width), padding_id, dtype=torch.int64)
    loss_mask = torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        loss_mask[row, : len(example.trained)] = example.trained
    # Nothing predicts a sequence's first token; truncation on the left can leave it trained.
    loss_mask[:, 0] = 0.0
    return Batch(
        tokens=tokens,
        lengths=lengths,
        loss_mask=loss_mask,
        per_sequence=_per_sequence(items),
        unit=len(sequences_of(items[0])),
    )


def _per_sequence(items: Sequence[Item]) -> dict[str, Tensor]:
    margins = [item.margin for item in items if isinstance(item, Pair)]
    if margins:
        return {"margin": torch.tensor(margins).repeat_interleave(2)}
    labels = [item.desirable for item in items if isinstance(item, LabelledExample)]
    return {"desirable": torch.tensor(labels)} if labels else {}
