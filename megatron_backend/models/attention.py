"""Core attention on torch's `scaled_dot_product_attention`, for the CPU layer spec.

Megatron's own module for the CPU repeats keys and values for grouped queries, and writes out the
whole score matrix. This one does neither: grouped queries read shared keys through views, and
causal attention goes to the fused kernel.

Three shapes of call, told apart by the mask and the lengths:

- no mask, as many queries as keys: causal (training; right padding needs no more than that, since
  no real token looks at a later one);
- no mask, fewer queries than keys (decoding with a KV cache): the queries are the last positions,
  so query i of n sees all keys but the last n - 1 - i;
- a boolean mask, True where attention is forbidden (Megatron's convention), broadcastable to
  [batch, heads, queries, keys]: exactly what it says, and nothing beside it.
"""

import math
from typing import Any

import torch
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
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attention_dropout or config.attention_dropout:
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
        """Attention of `query` over `key` and `value`.

        Args:
            query: [queries, batch, heads, head_dim].
            key, value: [keys, batch, KV heads, head_dim].
            attention_mask: see the module's text.
            attn_mask_type: not needed, since the shapes tell.
            attention_bias, packed_seq_params: must be None.

        Returns:
            [queries, batch, heads * head_dim].
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise NotImplementedError("the CPU's core attention has neither packing nor a bias")
        queries, batch, heads, _ = query.shape
        keys, kv_heads = key.shape[0], key.shape[2]
        mask = None
        if attention_mask is not None:
            mask = ~attention_mask
        elif 1 < queries < keys:
            mask = query.new_ones((queries, keys), dtype=torch.bool).tril(keys - queries)
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None and queries == keys,
            scale=self.scale,
            enable_gqa=heads != kv_heads,
        )
        return context.permute(2, 0, 1, 3).reshape(queries, batch, -1)
