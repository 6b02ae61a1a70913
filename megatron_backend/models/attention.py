"""Core attention on torch's `scaled_dot_product_attention`, for the CPU layer spec.

Megatron's own module for the CPU repeats keys and values for grouped queries, and writes out the
whole score matrix. This one does neither: grouped queries read shared keys through views, and
causal attention goes to the fused kernel.

It knows one mask, the causal one. Right padding needs no more than that, since no real token looks
at a later one. Decoding over a cache of keys and values is the business of `generation`.
"""

import math
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SdpaAttention(MegatronModule):
    """Drop-in for Megatron's `DotProductAttention`, without dropout and sequence packing."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        **_same_for_every_layer: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("the CPU's core attention has no dropout")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Causal attention of `query` over `key` and `value`.

        Args:
            query: [T, B, heads, head_dim].
            key, value: [T, B, KV heads, head_dim].
            attention_mask, attention_bias, packed_seq_params: must be None.
            attn_mask_type: Megatron's name for causal.

        Returns:
            [T, B, heads * head_dim].

        Raises:
            NotImplementedError: anything but plain causal attention was asked for.
        """
        causal = attn_mask_type in (None, AttnMaskType.causal) and len(query) == len(key)
        extras = (attention_mask, attention_bias, packed_seq_params)
        if not causal or any(extra is not None for extra in extras):
            raise NotImplementedError("the CPU's core attention is causal, without mask or packing")
        # The kernel is a fifth faster on heads that lie together, copies included.
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3).contiguous(),
            key.permute(1, 2, 0, 3).contiguous(),
            value.permute(1, 2, 0, 3).contiguous(),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
