"""To what multiple sequences and vocabularies are padded, so that ranks get whole and equal pieces.

Context parallelism cuts a sequence into 2 x CP chunks and gives each rank one from either end, so
that causal attention costs all of them the same. Sequence parallelism cuts what a rank has by TP.
Eight-bit matrix products want lengths that their kernels know, and want them of the piece that a
rank has at last, not of the whole. `padding_factor` is the only place that knows all three.

Tensor parallelism splits the vocabulary evenly, so it is padded up. The padded rows belong to no
token: losses and samplers leave their logits out, imports fill them with zeros, exports drop them.
"""

from math import lcm

from service.spec.layout import Layout
from service.spec.parts import Fp8Spec

# A multiple of 128 keeps GPU matrix products aligned. A vocabulary of a few hundred tokens gains
# nothing by it, and would grow by half.
_LARGE_DIVISOR, _SMALL_DIVISOR, _LARGE_FROM = 128, 8, 1024
_FP8_ALIGNMENT = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


def fp8_alignment(fp8: Fp8Spec | None) -> int:
    """What the tokens of one rank must be a multiple of; 1 without FP8."""
    return 1 if fp8 is None else _FP8_ALIGNMENT[fp8.recipe]


def padding_factor(layout: Layout, *, fp8: Fp8Spec | None = None) -> int:
    """The least number whose multiples are lengths that this layout can carry.

    Without FP8 it is CP x lcm(2, TP) where sequences are cut by context and by sequence
    parallelism, 2 x CP or TP where only one of them cuts, and 1 where none does.

    Args:
        layout: of training.
        fp8: the recipe, if matrix products are in 8 bits.
    """
    shards = layout.tp if layout.sequence_parallel else 1
    cut = layout.cp * lcm(2, shards) if layout.cp > 1 else shards
    return lcm(cut, layout.cp * shards * fp8_alignment(fp8))


def padded_vocab_size(vocab_size: int, *, tp: int, divisor: int | None = None) -> int:
    """Rows of embedding and output layer: the next multiple of `divisor * tp`.

    Args:
        vocab_size: number of real tokens.
        tp: tensor parallelism of the layout.
        divisor: what each rank's share is a multiple of; null takes 128, or 8 for less than 1024
            tokens.
    """
    if divisor is None:
        divisor = _LARGE_DIVISOR if vocab_size >= _LARGE_FROM else _SMALL_DIVISOR
    multiple = divisor * tp
    return -(-vocab_size // multiple) * multiple
