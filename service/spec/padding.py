"""To what multiple sequences are padded, so that every rank gets whole and equal pieces.

Context parallelism cuts a sequence into 2 x CP chunks and gives each rank one from either end, so
that causal attention costs all of them the same. Sequence parallelism cuts what a rank has by TP.
Eight-bit matrix products want lengths that their kernels know, and want them of the piece that a
rank has at last, not of the whole. This function is the only place that knows all three.
"""

from math import lcm

from service.spec.layout import Layout
from service.spec.parts import Fp8Spec

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
