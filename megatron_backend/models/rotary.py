"""Self-attention that turns the queries and keys of many sequences at once, for the CPU layer spec.

Megatron's turns each packed sequence by itself, and computes cosines and sines anew in every layer.
Here one table serves all layers of a micro-batch, and what is turned lies head by head in memory,
as `SdpaAttention` likes it. Decoding with one of Megatron's inference contexts is Megatron's.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_backend.models.packing import PackedSequences


class RotaryAttention(SelfAttention):
    """Megatron's self-attention, with rotary embeddings made for many sequences in training."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention and its output projection.

        Args:
            hidden_states: [T, B, H].
            attention_mask: must be None.
            rotary_pos_emb: [places, 1, 1, head_dim] angles: of this rank's slots, or of all
                places of a sequence where sequences are packed; None turns nothing.
            packed_seq_params: see `SdpaAttention`.
            others: what Megatron hands on for decoding; all None without an `inference_context`.

        Returns:
            [T, B, H], and the projection's bias to add, if any.

        Raises:
            NotImplementedError: something of `others` was given.
        """
        if others.get("inference_context") is not None:
            return super().forward(
                hidden_states,
                attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **others,
            )
        asked = [name for name, value in others.items() if value is not None]
        if asked:
            raise NotImplementedError(f"the CPU's attention in training knows no {asked}")
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        if rotary_pos_emb is not None:
            scale = self._yarn_concentration_factor
            table = rotation_table(rotary_pos_emb, packed_seq_params, query.dtype, scale=scale)
            query, key = _Rotation.apply(query, *table), _Rotation.apply(key, *table)
        arguments = {
            "attn_mask_type": self.attn_mask_type,
            "packed_seq_params": packed_seq_params,
        }
        if self.checkpoint_core_attention and self.training:
            context = self._checkpointed_attention_forward(
                query, key, value, attention_mask, **arguments
            )
        else:
            context = self.core_attention(query, key, value, attention_mask, **arguments)
        output, bias = self.linear_proj(context)
        return output, bias


def rotation_table(
    angles: Tensor, packed: PackedSequences | None, dtype: torch.dtype, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, both [T, 1, 1, head_dim / 2], of this rank's slots.

    Layers that are given the same angles share one table, which lives as long as `packed`.
    """
    if packed is None or packed.positions is None:
        return _cos_sin(angles, dtype, scale)
    # The entry holds on to the angles, so that no other tensor can come to have their id.
    entry = packed.rotations.get(id(angles))
    if entry is None:
        entry = (angles, _cos_sin(angles[packed.positions], dtype, scale))
        packed.rotations[id(angles)] = entry
    table: tuple[Tensor, Tensor] = entry[1]
    return table


def _cos_sin(angles: Tensor, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    # Both halves of a head turn by the same angles (Megatron's layout without interleaving).
    half = angles[..., : angles.shape[-1] // 2]
    return (half.cos() * scale).to(dtype), (half.sin() * scale).to(dtype)


class _Rotation(torch.autograd.Function):
    """Rotary embedding of [T, B, heads, head_dim] in memory of [heads, B, T, head_dim]."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        memory = heads.new_empty([heads.shape[at] for at in (2, 1, 0, 3)])
        return _turn(heads, cos, sin, out=memory.permute(2, 1, 0, 3))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        return _turn(gradient, cos, -sin, out=out), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    one, two = out.chunk(2, -1)
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=two).addcmul_(first, sin)
    return out
