"""A forward pass that keeps keys and values: prompts at once, then one token a row.

Megatron's own layers spend most of a small decoding step outside its arithmetic: they transpose to
[sequence, batch], compute the sines of every position again, repeat keys and values for grouped
queries, and pass through a dozen modules. Here a step is about twenty tensor operations a layer,
on the model's own weights. Three choices carry it:

- The fused QKV product of one token is viewed as [rows, KV heads, n queries + key + value, head].
  So queries of one KV head are the rows of one small matrix product with its keys, and grouped
  queries need no repetition. Queries and key are rotated together, in one operation.
- The softmax scale goes into the cosines and sines of the queries, since rotation is linear.
- Only a prompt's last token is asked what comes next. So in the last layer only keys and values
  are computed for the others.

Tests hold it to the full forward pass of Megatron and of transformers.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_backend.generation.decoder_weights import DecoderWeights, LayerWeights
from megatron_backend.generation.kv_cache import KeyValueCache


class CachedDecoder:
    """One model's forward pass over a `KeyValueCache`, on this rank's shard.

    Args:
        weights: of the model.
        positions: how many positions a sequence can have.
    """

    def __init__(self, weights: DecoderWeights, *, positions: int) -> None:
        self.weights = weights
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32), weights.inverse_frequencies.float()
        )
        # Rotating (a, b) gives (a cos - b sin, b cos + a sin): the halves swapped, times these.
        dtype = weights.embedding.dtype
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(dtype)
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype)
        scales = torch.ones(weights.queries_per_key + 1, 1, dtype=dtype)
        scales[:-1] = weights.head_dim**-0.5
        self._scales = scales

    def prefill(self, tokens: Tensor, padding: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Whole prompts.

        Args:
            tokens: [B, P] ids, padded on the left.
            padding: [B] number of padding tokens.

        Returns:
            The logits [B, vocabulary / tp] after the last token, and keys and values of each
            layer, [B, KV heads, P, head_dim].
        """
        width = tokens.shape[1]
        places = torch.arange(width) - padding[:, None]
        rotation = self._rotation(places.clamp(min=0))
        mask = _prompt_mask(places) if bool(padding.any()) else None
        hidden = self._embed(tokens)
        keys, values = [], []
        for layer in self.weights.layers:
            heads = self._heads(layer, hidden, rotation)
            key, value = (heads[..., -2, :].transpose(1, 2), heads[..., -1, :].transpose(1, 2))
            keys.append(key)
            values.append(value)
            if layer is self.weights.layers[-1]:
                last = None if mask is None else _additive(mask[:, :, -1:], key.dtype)
                context = _attend_one(heads[:, -1, :, :-2], key, value, last)
                hidden = hidden[:, -1]
            else:
                context = _attend_causally(heads[..., :-2, :], key, value, mask)
            hidden = self._rest_of_layer(layer, hidden, context)
        return self._logits(hidden), keys, values

    def step(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """One more token a row, which the cache then holds.

        Args:
            tokens: [rows] ids.
            cache: as `prefill` and earlier steps left it.

        Returns:
            [rows, vocabulary / tp] logits of the token after it.
        """
        rotation = self._rotation(cache.positions())
        slot = cache.length
        cache.length += 1
        mask = cache.mask()
        hidden = self._embed(tokens)
        for layer, keys, values in zip(self.weights.layers, cache.keys, cache.values, strict=True):
            heads = self._heads(layer, hidden, rotation)
            keys[:, :, slot] = heads[:, :, -2]
            values[:, :, slot] = heads[:, :, -1]
            context = _attend_one(
                heads[:, :, :-2], keys[:, :, : slot + 1], values[:, :, : slot + 1], mask
            )
            hidden = self._rest_of_layer(layer, hidden, context)
        return self._logits(hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[..., hidden]; each rank looks up the tokens of its part of the vocabulary."""
        weights = self.weights
        if weights.group is None:
            return F.embedding(tokens, weights.embedding)
        local = tokens - weights.embedding.shape[0] * weights.group.rank()
        elsewhere = (local < 0) | (local >= weights.embedding.shape[0])
        hidden = F.embedding(local.masked_fill(elsewhere, 0), weights.embedding)
        return self._sum_over_ranks(hidden.masked_fill_(elsewhere[..., None], 0))

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, n + 1, head_dim] at `positions` [...]."""
        return (
            self._cos[positions][..., None, None, :] * self._scales,
            self._sin[positions][..., None, None, :] * self._scales,
        )

    def _heads(
        self, layer: LayerWeights, hidden: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[..., KV heads, n + 2, head_dim]: rotated queries, rotated key, value."""
        weights = self.weights
        normed = self._norm(hidden, layer.attention_norm)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        if weights.qkv_slots is not None:
            qkv = self._gather(qkv).unflatten(-1, (-1, weights.head_dim))[..., weights.qkv_slots, :]
            qkv = qkv.flatten(-2)
        heads = qkv.unflatten(-1, (weights.kv_heads, weights.queries_per_key + 2, weights.head_dim))
        turned = heads[..., :-1, :]
        if layer.head_norm is not None:
            turned = self._norm(turned, layer.head_norm)
        cos, sin = rotation
        swapped = torch.roll(turned, weights.head_dim // 2, -1)
        heads[..., :-1, :] = (turned * cos).addcmul_(swapped, sin)
        return heads

    def _rest_of_layer(self, layer: LayerWeights, hidden: Tensor, context: Tensor) -> Tensor:
        """Attention's output projection and the MLP, each added to the residual stream."""
        hidden = hidden + self._sum_over_ranks(F.linear(context, layer.projection))
        gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return hidden + self._sum_over_ranks(F.linear(F.silu(gate).mul_(up), layer.down))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._norm(hidden, self.weights.final_norm), self.weights.output)

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension (Zhang, Sennrich, arXiv 1910.07467, equation 4)."""
        wide = values.float()
        scale = (wide.square().mean(-1, keepdim=True)).add_(self.weights.norm_epsilon).rsqrt_()
        return (wide * scale).to(values.dtype).mul_(weight)

    def _sum_over_ranks(self, partial: Tensor) -> Tensor:
        if self.weights.group is not None:
            dist.all_reduce(partial, group=self.weights.group)
        return partial

    def _gather(self, shard: Tensor) -> Tensor:
        group = self.weights.group
        assert group is not None, "only a tensor-parallel layout has shards"
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return torch.cat(shards, dim=-1)


def _prompt_mask(places: Tensor) -> Tensor:
    """[B, 1, P, P] True where a token may look: at real tokens up to itself.

    Padding may look at itself: a softmax over nothing would be NaN, and spread.
    """
    width = places.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return ((causal & (places >= 0)[:, None]) | torch.eye(width, dtype=torch.bool))[:, None]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _attend_one(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of one token a row; the scale is in the queries already.

    Args:
        queries: [B, KV heads, n, head_dim].
        keys, values: [B, KV heads, K, head_dim].
        mask: [B, 1, 1, K] to add, or None.

    Returns:
        [B, heads * head_dim].
    """
    scores = torch.matmul(queries, keys.transpose(-1, -2))
    if mask is not None:
        scores += mask
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, values).flatten(1)


def _attend_causally(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention within prompts; the scale is in the queries already.

    Args:
        queries: [B, P, KV heads, n, head_dim].
        keys, values: [B, KV heads, P, head_dim].
        mask: [B, 1, P, P], True where a token may look; None is causal.

    Returns:
        [B, P, heads * head_dim].
    """
    context = F.scaled_dot_product_attention(
        queries.flatten(2, 3).transpose(1, 2),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=1.0,
        enable_gqa=queries.shape[3] > 1,
    )
    return context.transpose(1, 2).flatten(2)
