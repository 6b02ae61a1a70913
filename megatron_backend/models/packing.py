"""What a layer is told of a packed stream: sequences that lie end to end in one row.

FP8 takes its scales from whole tensors, filler included. Filler that copies a real token at its
place has activations that are there anyway; filler inside a row has others, and is kept at 0 in all
layers: `blank_filler` clears the embedding's and each attention's. Norms, matrices without bias and
activation functions keep 0 as it is, and what a bias makes of it on the way to queries and keys is
in no product in 8 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed stream, and what the CPU's attention keeps beside it.

    Lengths count the filler of each row: attention is causal, so no real token sees it.
    """

    positions: Tensor | None = None
    """[N] int64: place of each of this rank's slots in its own sequence."""
    blank: Tensor | None = None
    """[N] bool: this rank's slots whose activations FP8 must not see; None where there are none."""
    rotations: dict[int, Any] = field(default_factory=dict)
    """The CPU's tables of cosines and sines for these slots; see `models.rotary`."""


def packed_sequences(
    slots: Sequence[int], positions: Tensor, blank: Tensor | None = None
) -> PackedSequences:
    """The description of sequences that have so many slots each, over all context-parallel ranks.

    Args:
        slots: of each sequence.
        positions, blank: see `PackedSequences`; on the model's device.
    """
    ends = torch.tensor([0, *slots]).cumsum(0).to(device=positions.device, dtype=torch.int32)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(slots),
        max_seqlen_kv=max(slots),
        positions=positions,
        blank=blank,
    )


def blank_filler(chunk: GPTModel) -> None:
    """Keeps what is `blank` in a packed stream at 0 in all layers of a chunk, backward as well.

    The mask comes with each call, so a pass that is computed again, while others are under way,
    finds its own.
    """

    def embedded(_block: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden, blank = kwargs.get("hidden_states"), _blank(kwargs)
        if hidden is None or blank is None:  # later chunks are sent what is 0 already
            return None
        if chunk.config.sequence_parallel:
            blank = scatter_to_sequence_parallel_region(blank, group=chunk.pg_collection.tp)
        return args, kwargs | {"hidden_states": _cleared(hidden, blank)}

    def attended(_attention: Any, _args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        blank = _blank(kwargs)
        return output if blank is None else _cleared(output, blank)

    chunk.decoder.register_forward_pre_hook(embedded, with_kwargs=True)
    for layer in chunk.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(attended, with_kwargs=True)


def _blank(kwargs: dict[str, Any]) -> Tensor | None:
    packed = kwargs.get("packed_seq_params")
    return packed.blank if isinstance(packed, PackedSequences) else None


def _cleared(values: Tensor, blank: Tensor) -> Tensor:
    """[N, ...] with 0 where `blank` [N] says so, whatever is there."""
    return values.masked_fill(blank.view(-1, *[1] * (values.dim() - 1)), 0.0)
