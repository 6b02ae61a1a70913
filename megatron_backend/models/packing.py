"""What a layer is told of a packed stream: sequences that lie end to end in one row."""

from dataclasses import dataclass, field
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed stream, and what the CPU's attention keeps beside it.

    Lengths count the filler of each row: attention is causal, so no real token sees it.
    """

    positions: Tensor | None = None
    """[N] int64: place of each of this rank's slots in its own sequence."""
    rotations: dict[int, Any] = field(default_factory=dict)
    """The CPU's tables of cosines and sines for these slots; see `models.attention`."""
