"""What a layer is told of a packed stream: sequences that lie end to end in one row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed stream, and what the CPU's attention keeps beside it.

    Lengths count the filler of each row: attention is causal, so no real token sees it.
    """

    positions: Tensor | None = None
    """[N] int64: place of each of this rank's slots in its own sequence."""
    rotations: dict[int, Any] = field(default_factory=dict)
    """The CPU's tables of cosines and sines for these slots; see `models.rotary`."""


def packed_sequences(slots: Sequence[int], positions: Tensor) -> PackedSequences:
    """The description of sequences that have so many slots each, over all context-parallel ranks.

    Args:
        slots: of each sequence.
        positions: see `PackedSequences`; on the model's device.
    """
    ends = torch.tensor([0, *slots]).cumsum(0).to(device=positions.device, dtype=torch.int32)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(slots),
        max_seqlen_kv=max(slots),
        positions=positions,
    )
