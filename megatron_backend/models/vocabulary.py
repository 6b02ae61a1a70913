"""Vocabulary padding: how many rows embedding and output layer have, and which are real.

Tensor parallelism splits the vocabulary evenly, so it is padded up. The padded rows belong to no
token: losses and samplers leave their logits out, imports fill them with zeros, exports drop them.
"""

# A multiple of 128 keeps GPU matrix products aligned. A vocabulary of a few hundred tokens gains
# nothing by it, and would grow by half.
LARGE_DIVISOR, SMALL_DIVISOR, LARGE_FROM = 128, 8, 1024


def padded_vocab_size(vocab_size: int, *, tp: int, divisor: int | None = None) -> int:
    """The next multiple of `divisor * tp`.

    Args:
        vocab_size: number of real tokens.
        tp: tensor parallelism of the layout.
        divisor: what each rank's share is a multiple of; null takes 128, or 8 for less than 1024
            tokens.
    """
    if divisor is None:
        divisor = LARGE_DIVISOR if vocab_size >= LARGE_FROM else SMALL_DIVISOR
    multiple = divisor * tp
    return -(-vocab_size // multiple) * multiple


def real_columns(vocab_size: int, *, width: int, tp_rank: int) -> int:
    """How many of a rank's `width` logits belong to real tokens; they come first."""
    return min(max(vocab_size - width * tp_rank, 0), width)
