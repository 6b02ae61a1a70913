"""A forward pass that keeps keys and values: prompts at once, then one token a row.

Megatron's own layers spend most of a small decoding step outside its arithmetic: they transpose to
[sequence, batch], compute the sines of every position again, repeat keys and values for grouped
queries, and pass through a dozen modules. Here a step is sixteen tensor operations a layer. Five
choices carry it:

- The fused QKV product of one token is viewed as [rows, KV heads, n queries + key + value, head].
  So queries of one KV head are the rows of one small matrix product with its keys, and grouped
  queries need no repetition. Queries and key are rotated together, in place, by one complex
  multiplication (see `decoder_weights`); key and value are cached together, by one copy.
- The scale of the scores goes into the rotation of the queries, since rotation is linear.
- A step multiplies few rows by large matrices, which `matrices` does at the speed of memory. The
  activation, the gate and the residual stream are part of a product.
- A norm's weights are in the matrices behind it in fp32, but before experts (`decoder_weights`);
  here rows are divided by their length.
- Only a prompt's last token is asked what comes next. So in the last layer only keys and values
  are computed for the others.

Tests hold it to the full forward pass of Megatron and of transformers.
"""

import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_backend.generation.decoder_weights import (
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    MlpWeights,
)
from megatron_backend.generation.kv_cache import KeyValueCache
from megatron_backend.generation.matrices import Matrix
from megatron_backend.models.rope import inverse_frequencies
from service.spec.rope_config import RopeConfig


class CachedDecoder:
    """One model's forward pass over a `KeyValueCache`, on this rank's shard.

    Args:
        weights: of the model.
        positions: how many positions a sequence can have.
    """

    def __init__(self, weights: DecoderWeights, *, positions: int) -> None:
        self.weights, self._config = weights, weights.config
        epsilon = self._config.norm_eps
        self._epsilon = torch.tensor(epsilon)
        self._least_length = torch.tensor(math.sqrt(epsilon * self._config.hidden_size))
        self._rotations = _rotations(weights, self._config.rope, positions)
        local = self._config.local_rope
        self._local_rotations = None if local is None else _rotations(weights, local, positions)

    def prefill(self, tokens: Tensor, padding: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Whole prompts.

        Args:
            tokens: [B, P] ids, padded on the left.
            padding: [B] number of padding tokens.

        Returns:
            The logits [B, vocabulary / tp] after the last token, and keys and values of each
            layer, [B, KV heads, 2, P, head_dim].
        """
        rows, width = tokens.shape
        places = torch.arange(width) - padding[:, None]
        rotations = self._rotations_at(places.clamp(min=0).flatten())
        mask_of = functools.cache(functools.partial(_prompt_mask, places, bool(padding.any())))
        hidden = self._embed(tokens.flatten())
        pieces = []
        for layer in self.weights.layers:
            heads = self._heads(layer, hidden, rotations[layer.local_rope]).unflatten(
                0, (rows, width)
            )
            piece = heads[..., -2:, :].permute(0, 2, 3, 1, 4)
            pieces.append(piece)
            queries = heads[..., :-2, :]
            if layer is self.weights.layers[-1]:
                hidden = hidden.unflatten(0, (rows, width))[:, -1].contiguous()
                queries = queries[:, -1:]
            mask = mask_of(layer.window, queries.shape[1])
            context = _attend(
                queries, piece[:, :, 0], piece[:, :, 1], mask, self._config.attention_softcap
            )
            hidden = self._rest_of_layer(layer, hidden, context)
        return self._logits(hidden), pieces

    def step(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """One more token a row, which the cache then holds.

        Args:
            tokens: [rows] ids.
            cache: as `prefill` and earlier steps left it.

        Returns:
            [rows, vocabulary / tp] logits of the token after it.
        """
        rotations = self._rotations_at(cache.positions())
        cache.length += 1
        mask = cache.mask()
        hidden = self._embed(tokens)
        for number, layer in enumerate(self.weights.layers):
            heads = self._heads(layer, hidden, rotations[layer.local_rope])
            memory = cache.write(number, heads[:, :, -2:])
            first = 0 if layer.window is None else max(cache.length - 1 - layer.window, 0)
            seen = memory[:, :, first : cache.length]
            context = _attend_one(
                heads[:, :, :-2].flatten(0, 1),
                seen[:, 0],
                seen[:, 1],
                None if mask is None else mask[..., first:],
                self._config.attention_softcap,
            )
            hidden = self._rest_of_layer(layer, hidden, context.view(len(hidden), -1))
        return self._logits(hidden)

    def _rotations_at(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """[N, 1, n + 1, head_dim / 2] complex of each position, and of layers with local ones."""
        local = self._local_rotations
        return self._rotations[positions, None], None if local is None else local[positions, None]

    def _embed(self, tokens: Tensor) -> Tensor:
        """[N, hidden]: the bottom of the residual stream."""
        hidden = self._look_up(tokens)
        if self._config.embedding_scale is None:
            return hidden
        return hidden.mul_(torch.tensor(self._config.embedding_scale, dtype=hidden.dtype))

    def _look_up(self, tokens: Tensor) -> Tensor:
        """[N, hidden]; each rank looks up the tokens of its part of the vocabulary."""
        weights = self.weights
        if weights.group is None:
            return F.embedding(tokens, weights.embedding)
        local = tokens - weights.embedding.shape[0] * weights.group.rank()
        elsewhere = (local < 0) | (local >= weights.embedding.shape[0])
        hidden = F.embedding(local.masked_fill(elsewhere, 0), weights.embedding)
        return self._sum_over_ranks(hidden.masked_fill_(elsewhere[..., None], 0))

    def _heads(self, layer: LayerWeights, hidden: Tensor, rotation: Tensor | None) -> Tensor:
        """[N, KV heads, n + 2, head_dim]: rotated queries, rotated key, value.

        Args:
            layer: whose.
            hidden: [N, hidden].
            rotation: [N, 1, n + 1, head_dim / 2], of each token's position.
        """
        assert rotation is not None, "layers turn locally only where there are local frequencies"
        weights = self.weights
        qkv = layer.qkv(self._norm_before(hidden, layer.attention_norm))
        if weights.qkv_rows is not None:
            qkv = self._gather(qkv).index_select(-1, weights.qkv_rows)
        heads = qkv.view(-1, weights.kv_heads, weights.queries_per_key + 2, self._config.head_dim)
        turned = heads[:, :, :-1]
        if layer.head_norm is not None:
            turned.copy_(self._norm(turned, None).mul_(layer.head_norm))
        if heads.dtype == torch.float32:
            _as_complex(heads)[:, :, :-1].mul_(rotation)
        else:
            turned.copy_(torch.view_as_real(_as_complex(turned.float()) * rotation).flatten(-2))
        return heads

    def _rest_of_layer(self, layer: LayerWeights, hidden: Tensor, context: Tensor) -> Tensor:
        """Attention's output projection and the MLP, each added to the residual stream."""
        hidden = self._add_product(hidden, context, layer.projection, layer.projection_norm)
        normed = self._norm_before(hidden, layer.mlp_norm)
        if isinstance(layer.mlp, ExpertWeights):
            return hidden.add_(self._sum_over_ranks(self._mixture(layer.mlp, normed)))
        gated = self._gated(layer.mlp, normed)
        return self._add_product(hidden, gated, layer.mlp.down, layer.down_norm)

    def _gated(self, mlp: MlpWeights, normed: Tensor) -> Tensor:
        return mlp.up.times(normed, mlp.gate.activated(normed, self._config.activation))

    def _mixture(self, mixture: ExpertWeights, normed: Tensor) -> Tensor:
        """[N, hidden]: each token's experts, by their weights; sorted, so that each expert sees
        its tokens at once."""
        logits = F.linear(normed.float(), mixture.router.float())
        if mixture.softmax_first:
            shares, chosen = logits.softmax(-1).topk(mixture.top_k)
        else:
            top, chosen = logits.topk(mixture.top_k)
            shares = top.softmax(-1)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // mixture.top_k
        counts = torch.bincount(chosen.flatten(), minlength=len(mixture.experts)).tolist()
        outputs = [
            expert.down(self._gated(expert, part))
            for expert, part in zip(mixture.experts, normed[tokens].split(counts), strict=True)
            if len(part)
        ]
        weighted = torch.cat(outputs).mul_(shares.flatten()[order, None])
        return torch.zeros_like(normed).index_add_(0, tokens, weighted)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.weights.output(self._norm_before(hidden, self.weights.final_norm))
        cap = self._config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _norm_before(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """RMSNorm before a matrix; where the matrix has its weights, what is left of it."""
        if weight is not None:
            return self._norm(hidden, weight)
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return hidden / length.hypot_(self._least_length)

    def _norm(self, values: Tensor, weight: Tensor | None) -> Tensor:
        """RMSNorm (arXiv 1910.07467, equation 4), computed in the format of its weight."""
        wide = values if weight is None else values.to(weight.dtype)
        if wide.dtype != torch.float32:
            normed = F.rms_norm(wide, values.shape[-1:], weight, self._config.norm_eps)
            return normed.to(values.dtype)
        # Half as many operations as torch's own has on a CPU.
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._epsilon, length, length, value=1 / wide.shape[-1])
        normed = wide * mean_square.rsqrt_()
        return (normed if weight is None else normed.mul_(weight)).to(values.dtype)

    def _add_product(
        self, hidden: Tensor, values: Tensor, matrix: Matrix, norm: Tensor | None
    ) -> Tensor:
        """`hidden` plus the product, which has a norm of its own in some models."""
        if self.weights.group is None and norm is None:
            return matrix.plus(values, hidden)
        product = self._sum_over_ranks(matrix(values))
        return hidden.add_(product if norm is None else self._norm(product, norm))

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


def _rotations(weights: DecoderWeights, rope: RopeConfig, positions: int) -> Tensor:
    """[positions, n + 1, head_dim / 2] complex: what queries and key are multiplied by."""
    frequencies = inverse_frequencies(rope, weights.config.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    scales = torch.ones(weights.queries_per_key + 1, 1)
    scales[:-1] = weights.config.softmax_scale
    return torch.polar(scales.expand(-1, angles.shape[1]), angles[:, None])


def _as_complex(heads: Tensor) -> Tensor:
    return torch.view_as_complex(heads.unflatten(-1, (-1, 2)))


def _prompt_mask(places: Tensor, padded: bool, window: int | None, queries: int) -> Tensor | None:
    """[B, 1, queries, P] True where one of the last tokens may look; None where that is causal.

    Padding may look at itself: a softmax over nothing would be NaN, and spread.
    """
    width = places.shape[1]
    if not padded and (window is None or window >= width - 1):
        return None
    slots = torch.arange(width)
    distance = slots[width - queries :, None] - slots
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance <= window)
    return ((seen & (places >= 0)[:, None]) | (distance == 0))[:, None]


def _attend_one(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention of one token a row; the scale is in the queries already.

    Args:
        queries: [rows * KV heads, n, head_dim].
        keys, values: [rows * KV heads, K, head_dim].
        mask: [rows * KV heads, 1, K] to add, or None.
        softcap: scores become cap * tanh(score / cap); None leaves them.

    Returns:
        [rows * KV heads, n, head_dim].
    """
    if mask is not None and softcap is None:
        scores = torch.baddbmm(mask, queries, keys.mT)
    else:
        scores = torch.bmm(queries, keys.mT)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
            scores = scores if mask is None else scores.add_(mask)
    return torch.bmm(torch.softmax(scores, dim=-1), values)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention of the last tokens of prompts; the scale is in the queries already.

    Args:
        queries: [B, Q, KV heads, n, head_dim]; Q is P, or 1.
        keys, values: [B, KV heads, P, head_dim].
        mask: [B, 1, Q, P], True where a token may look; None is causal.
        softcap: scores become cap * tanh(score / cap); None leaves them.

    Returns:
        [B * Q, heads * head_dim].
    """
    shared, one = queries.shape[3], queries.shape[1] == 1
    heads = queries.flatten(2, 3).transpose(1, 2)
    if softcap is None:
        context = F.scaled_dot_product_attention(
            heads,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and not one,
            scale=1.0,
            enable_gqa=shared > 1,
        )
    else:
        scores = heads @ keys.repeat_interleave(shared, 1).mT
        scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is None and not one:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        context = scores.softmax(-1) @ values.repeat_interleave(shared, 1)
    return context.transpose(1, 2).flatten(0, 1).flatten(1)
