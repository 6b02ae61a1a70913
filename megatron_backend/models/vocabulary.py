"""Vocabulary padding: how many rows embedding and output layer have, and which are real."""

from service.spec.padding import padded_vocab_size

__all__ = ["padded_vocab_size", "real_columns"]


def real_columns(vocab_size: int, *, width: int, tp_rank: int) -> int:
    """How many of a rank's `width` logits belong to real tokens; they come first."""
    return min(max(vocab_size - width * tp_rank, 0), width)
