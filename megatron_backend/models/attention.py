"""Core attention on torch's fused kernel, for the CPU layer spec.

Megatron's own for the CPU repeats keys and values for grouped queries, writes out every score
matrix, and knows no packed sequences. `SdpaAttention` runs the kernel on each sequence by itself,
grouped queries reading shared keys through views. With context parallelism a rank has two pieces of
each sequence: keys and values are gathered, and each piece looks at all that comes before it.

Right padding needs no mask, since no real token looks at a later one. Decoding over a cache of keys
and values is the business of `generation`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_backend.models.packing import PackedSequences

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

type Piece = tuple[int, int, int]
"""(column, start, length) of a sequence in [T, B]."""


class SdpaAttention(MegatronModule):
    """Causal core attention; takes the place of Megatron's `DotProductAttention`.

    Attributes:
        scale: multiplies the scores.
        window: a token sees itself and so many before it; None where it sees all.
        softcap: c in c tanh(score / c); None where scores are not capped.

    Raises:
        NotImplementedError: the config asks for something else: dropout, learned softmax offsets,
            scores scaled by the layer's number, attention that looks ahead.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,  # noqa: ARG002 - Transformer Engine's ways to share keys
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(config=config)
        refused = {
            "attention dropout": config.attention_dropout,
            "softmax offsets": config.softmax_type != "vanilla",
            "scores scaled by the layer's number": config.apply_query_key_layer_scaling,
            "attention that is not causal": attn_mask_type != AttnMaskType.causal,
            "cross-attention": attention_type != "self",
        }
        for what, asked in refused.items():
            if asked:
                raise NotImplementedError(f"the CPU's core attention has no {what}")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.softcap = softcap
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
        ):
            self.window = config.window_size[0]
        self._cp = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Causal attention of `query` over `key` and `value`, each sequence by itself.

        Args:
            query: [T, B, heads, head_dim], this context-parallel rank's slots (see
                `training.sequence`).
            key, value: [T, B, KV heads, head_dim].
            attention_mask, attention_bias: must be None.
            attn_mask_type: Megatron's name for causal.
            packed_seq_params: where each sequence is in [T, 1]; None where each column is one.

        Returns:
            [T, B, heads * head_dim].

        Raises:
            NotImplementedError: a mask or a bias was given.
        """
        causal = attn_mask_type in (None, AttnMaskType.causal)
        if not causal or attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("the CPU's core attention is causal, without mask or bias")
        pieces = _pieces(query, packed_seq_params)
        if self._cp is not None and self._cp.size() > 1:
            context = self._shared(query, key, value, pieces, self._cp)
        elif self.softcap is None and all(self._sees_all(length) for _, _, length in pieces):
            context = _CausalPieces.apply(query, key, value, pieces, self.scale)
        else:
            context = _joined(
                [
                    self._masked(*_slice(piece, query, key, value), torch.arange(piece[2]))
                    for piece in pieces
                ],
                query.shape[1],
            )
        return context.flatten(2)

    def _sees_all(self, length: int) -> bool:
        return self.window is None or length <= self.window + 1

    def _shared(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Sequence[Piece],
        group: torch.distributed.ProcessGroup,
    ) -> Tensor:
        """Attention of this rank's slots over those of all context-parallel ranks.

        The gradients that the ranks have for one key are summed on the rank that has it.
        """
        ranks, mine = group.size(), group.rank()
        whole = [
            gather_from_sequence_parallel_region(tensor.contiguous(), group=group).unflatten(
                0, (ranks, -1)
            )
            for tensor in (key, value)
        ]
        results = []
        for column, start, length in pieces:
            keys, values = (_in_order(part[:, start : start + length, column]) for part in whole)
            halves = query[start : start + length, column].chunk(2)
            parts = []
            for half, number in zip(halves, (mine, 2 * ranks - 1 - mine), strict=True):
                seen = (number + 1) * len(half)
                places = torch.arange(number * len(half), seen)
                parts.append(self._masked(half, keys[:seen], values[:seen], places))
            results.append(torch.cat(parts))
        return _joined(results, query.shape[1])

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        """[n, heads, head_dim]: attention of the tokens at `places` over all tokens up to them.

        Args:
            query: [n, heads, head_dim].
            key, value: [m, KV heads, head_dim] of places 0 to m - 1.
            places: [n].
        """
        distance = places.unsqueeze(1) - torch.arange(len(key))
        seen = distance >= 0
        if self.window is not None:
            seen &= distance <= self.window
        shared = query.shape[1] // key.shape[1]
        query = query.transpose(0, 1)
        key, value = (part.transpose(0, 1).repeat_interleave(shared, 0) for part in (key, value))
        if self.softcap is None:
            context = F.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=self.scale
            )
        else:
            scores = self.softcap * torch.tanh(query @ key.mT * (self.scale / self.softcap))
            weights = scores.masked_fill(~seen, -torch.inf).float().softmax(-1)
            context = weights.to(value.dtype) @ value
        return context.transpose(0, 1)


class _CausalPieces(torch.autograd.Function):
    """torch's fused causal attention, forward and backward, on each piece of [T, B, ...]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: list[Piece], scale: float
    ) -> Tensor:
        context = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        # Values come as a slice of the joint projection; the kernel is a fifth faster on heads
        # that lie together.
        value = value.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
        groups, sums = key.shape[2], []
        places = _queries(context, groups, pieces)
        for into, *heads in zip(places, *_grouped(query, key, value, pieces), strict=True):
            result, log_sum = _flash(*heads, 0.0, True, scale=scale)
            into.copy_(result)
            sums.append(log_sum)
        ctx.pieces, ctx.scale = pieces, scale
        ctx.save_for_backward(query, key, value, context, *sums)
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context, *sums = ctx.saved_tensors
        grads = [torch.empty_like(part) for part in (query, key, value)]
        groups, pieces = key.shape[2], ctx.pieces
        grad_keys, grad_values = (_keys(part, pieces) for part in grads[1:])
        parts = zip(
            _queries(gradient, groups, pieces),
            zip(*_grouped(query, key, value, pieces), strict=True),
            _queries(context, groups, pieces),
            sums,
            zip(_queries(grads[0], groups, pieces), grad_keys, grad_values, strict=True),
            strict=True,
        )
        for grad, heads, result, log_sum, (into_query, into_key, into_value) in parts:
            found = _flash_backward(grad, *heads, result, log_sum, 0.0, True, scale=ctx.scale)
            into_query.copy_(found[0])
            # Several queries share a key.
            torch.sum(found[1], 1, out=into_key)
            torch.sum(found[2], 1, out=into_value)
        return *grads, None, None


def _pieces(query: Tensor, packed: PackedSequences | None) -> list[Piece]:
    """Where sequences lie in [T, B], as far as they are on this context-parallel rank."""
    if packed is None:
        return [(column, 0, query.shape[0]) for column in range(query.shape[1])]
    ends: list[int] = packed.cu_seqlens_q.tolist()
    # With context parallelism every rank has an equal part of each sequence.
    ranks = ends[-1] // query.shape[0]
    ends = [end // ranks for end in ends]
    return [(0, start, end - start) for start, end in pairwise(ends)]


def _slice(
    piece: Piece, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    column, start, length = piece
    rows = slice(start, start + length)
    return query[rows, column], key[rows, column], value[rows, column]


def _joined(results: Sequence[Tensor], columns: int) -> Tensor:
    """[T, B, ...] from each piece's [n, ...]: pieces of one column follow each other."""
    return torch.cat(list(results)).unsqueeze(1) if columns == 1 else torch.stack(list(results), 1)


def _cut(heads: Tensor, pieces: Sequence[Piece]) -> Sequence[Tensor]:
    """Views of [..., T, B, d] by pieces, each [..., n, d]: all at once, since there are many."""
    if heads.shape[-2] > 1:
        return heads.unbind(-2)
    lengths = [length for _, _, length in pieces]
    return heads.squeeze(-2).split_with_sizes(lengths, -2)


def _queries(heads: Tensor, groups: int, pieces: Sequence[Piece]) -> Sequence[Tensor]:
    """[KV heads, queries to each, n, head_dim] of each piece."""
    return _cut(heads.unflatten(2, (groups, -1)).permute(2, 3, 0, 1, 4), pieces)


def _keys(heads: Tensor, pieces: Sequence[Piece]) -> Sequence[Tensor]:
    """[KV heads, n, head_dim] of each piece."""
    return _cut(heads.permute(2, 0, 1, 3), pieces)


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece]
) -> Sequence[Sequence[Tensor]]:
    """Queries, keys and values as the kernel wants them; queries of a group see the same memory."""
    groups = key.shape[2]
    shared = query.shape[2] // groups
    wide = [part.permute(2, 0, 1, 3).unsqueeze(1) for part in (key, value)]
    keys, values = (_cut(part.expand(-1, shared, -1, -1, -1), pieces) for part in wide)
    return _queries(query, groups, pieces), keys, values


def _in_order(parts: Tensor) -> Tensor:
    """[n, ...] in the sequence's own order, from [ranks, n / ranks, ...] as the ranks have it."""
    first, last = parts.chunk(2, dim=1)
    return torch.cat([first.flatten(0, 1), last.flip(0).flatten(0, 1)])
