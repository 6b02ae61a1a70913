"""The tensors of a Megatron decoder, by what they do, for the decoder that keeps a cache.

They are read from the model anew for each call of `generate`, so a weight sync, which writes into
the model's parameters, can leave nothing stale behind. In fp32 matrices are copies (`matrices`),
which take up the norm before them (not experts, whose router reads normed rows too): its weights
and the square root of how many numbers it is over multiply the columns, and what is left to do in a
step is to divide by a length.

Rotary embeddings turn pairs of numbers. A pair is (i, i + head_dim / 2) in the model, and here it
is (2 i, 2 i + 1): queries and keys are permuted alike, which changes no product of the two, and
then a pair is one complex number and a rotation one multiplication.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_backend.generation.known_models import refuse_unknown, refuse_unread
from megatron_backend.generation.matrices import Matrix
from service.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """A gated MLP, this rank's shard.

    Attributes:
        gate, up: hidden to ffn.
        down: ffn to hidden.
    """

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """A mixture of experts.

    Attributes:
        router: [experts, hidden].
        top_k: experts that a token goes to.
        softmax_first: an expert's weight is its probability among all experts; otherwise among the
            token's own.
        experts: one MLP each.
    """

    router: Tensor
    top_k: int
    softmax_first: bool
    experts: list[MlpWeights]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer, this rank's shard. `n` is the number of query heads of one KV head.

    Attributes:
        attention_norm, mlp_norm: [hidden]; None where the matrices behind have it.
        qkv: hidden to KV heads * (n + 2) * head_dim; of each KV head its queries, then its key,
            then its value. Pairs lie together in queries and key (see the module's text) unless
            `DecoderWeights.qkv_rows` has to bring them together.
        head_norm: [n + 1, head_dim], norm weights of queries and key; None without.
        projection: heads * head_dim to hidden.
        mlp: what follows attention.
        projection_norm, down_norm: [hidden], norms of what attention and MLP add; None without.
        window: a token sees itself and so many before it; None where it sees all.
        local_rope: turns by the local frequencies.
    """

    attention_norm: Tensor | None
    qkv: Matrix
    head_norm: Tensor | None
    projection: Matrix
    projection_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: MlpWeights | ExpertWeights
    down_norm: Tensor | None
    window: int | None
    local_rope: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole decoder, this rank's shard.

    Attributes:
        config: the model's.
        group: the tensor-parallel group; None where there is one rank.
        embedding: [vocabulary / tp, hidden].
        output: hidden to vocabulary / tp.
        layers: from the bottom.
        final_norm: [hidden]; None where `output` has it.
        queries_per_key: query heads of one KV head on this rank.
        kv_heads: KV heads on this rank.
        qkv_rows: where there are fewer KV heads than ranks: which rows of the gathered QKV product
            are this rank's queries, key and value.
    """

    config: ModelConfig
    group: dist.ProcessGroup | None
    embedding: Tensor
    output: Matrix
    layers: list[LayerWeights]
    final_norm: Tensor | None
    queries_per_key: int
    kv_heads: int
    qkv_rows: Tensor | None

    @classmethod
    def of(cls, model: Any, config: ModelConfig) -> "DecoderWeights":
        """Reads a GPTModel that holds all its layers.

        Raises:
            NotImplementedError: the model has a part that the cached decoder does not know.
        """
        refuse_unknown(model)
        tp = model.pg_collection.tp.size()
        heads = config.num_heads // tp
        kv_heads = max(config.num_kv_heads // tp, 1)
        whole = config.num_kv_heads >= tp
        read = _Reader(config, queries_per_key=heads // kv_heads, whole_heads=whole)
        final_norm, output = read.output(model)
        weights = cls(
            config=config,
            group=model.pg_collection.tp if tp > 1 else None,
            embedding=read.of(model.embedding.word_embeddings.weight),
            output=output,
            layers=[read.layer(number, layer) for number, layer in enumerate(model.decoder.layers)],
            final_norm=final_norm,
            queries_per_key=heads // kv_heads,
            kv_heads=kv_heads,
            qkv_rows=None if whole else _rows(config, model.pg_collection.tp),
        )
        refuse_unread(model, read.seen)
        return weights


class _Reader:
    """Takes parameters out of Megatron's modules, and remembers which.

    Attributes:
        seen: `id` of each parameter that was read.

    Args:
        config: the model's.
        queries_per_key: query heads of one KV head on this rank.
        whole_heads: each rank's rows of the QKV matrix are whole KV heads with their queries.
    """

    def __init__(self, config: ModelConfig, *, queries_per_key: int, whole_heads: bool) -> None:
        self.seen: set[int] = set()
        self._config, self._queries_per_key = config, queries_per_key
        self._pairs = _paired(config.head_dim)
        self._whole_heads = whole_heads

    def of(self, parameter: Tensor) -> Tensor:
        self.seen.add(id(parameter))
        return parameter.detach()

    def norm(self, module: Any) -> Tensor:
        """A norm's weight as it multiplies. Zero-centred ones lack 1, and multiply before they
        round to the activations' format."""
        weight = self.of(module.weight)
        return 1.0 + weight.float() if self._config.zero_centered_norm else weight

    def behind_norm(self, module: Any, weight: Tensor) -> tuple[Tensor | None, Tensor]:
        """A norm's weight, and the matrix [out, hidden] behind it, which takes it up in fp32."""
        norm = self.norm(module)
        if weight.dtype != torch.float32:
            return norm, weight
        return None, weight * (norm * math.sqrt(len(norm)))

    def output(self, model: Any) -> tuple[Tensor | None, Matrix]:
        """The last norm, unless the output layer has it, and the output layer."""
        norm, weight = self.behind_norm(
            model.decoder.final_layernorm, self.of(_output_weight(model))
        )
        return norm, Matrix(weight)

    def layer(self, number: int, layer: Any) -> LayerWeights:
        config, attention = self._config, layer.self_attention
        window, bias = config.window_of(number), attention.linear_qkv.bias
        attention_norm, qkv = self.behind_norm(
            layer.input_layernorm, self.of(attention.linear_qkv.weight)
        )
        mlp_norm, mlp = self._mlp(layer)
        return LayerWeights(
            attention_norm=attention_norm,
            qkv=Matrix(
                self._in_pairs(qkv), None if bias is None else self._in_pairs(self.of(bias))
            ),
            head_norm=self._head_norm(attention) if config.qk_norm else None,
            projection=Matrix(self.of(attention.linear_proj.weight)),
            projection_norm=self._norm_behind(attention.linear_proj),
            mlp_norm=mlp_norm,
            mlp=mlp,
            down_norm=self._norm_behind(layer.mlp.linear_fc2) if config.post_norms else None,
            window=None if window is None else window - 1,
            local_rope=window is not None and config.local_rope is not None,
        )

    def _norm_behind(self, linear: Any) -> Tensor | None:
        return self.norm(linear.post_layernorm) if self._config.post_norms else None

    def _head_norm(self, attention: Any) -> Tensor:
        query, key = self.norm(attention.q_layernorm), self.norm(attention.k_layernorm)
        return torch.cat([query.expand(self._queries_per_key, -1), key[None]])[:, self._pairs]

    def _in_pairs(self, rows: Tensor) -> Tensor:
        """Rows of the fused matrix with pairs together, where this rank has whole heads."""
        if not self._whole_heads:
            return rows
        heads = rows.unflatten(0, (-1, self._queries_per_key + 2, self._config.head_dim))
        turned = heads[:, :-1, self._pairs]
        return torch.cat([turned, heads[:, -1:]], dim=1).flatten(0, 2)

    def _mlp(self, layer: Any) -> tuple[Tensor | None, MlpWeights | ExpertWeights]:
        """The norm before an MLP, unless its matrices have it, and the MLP."""
        moe, module = self._config.moe, layer.mlp
        if moe is None:
            norm, gate_up = self.behind_norm(
                layer.pre_mlp_layernorm, self.of(module.linear_fc1.weight)
            )
            return norm, self._dense(gate_up, module)
        return self.norm(layer.pre_mlp_layernorm), ExpertWeights(
            router=self.of(module.router.weight),
            top_k=moe.top_k,
            softmax_first=not moe.norm_topk_prob,
            experts=[
                self._dense(self.of(expert.linear_fc1.weight), expert)
                for expert in module.experts.local_experts
            ],
        )

    def _dense(self, gate_up: Tensor, module: Any) -> MlpWeights:
        gate, up = gate_up.chunk(2)
        return MlpWeights(
            gate=Matrix(gate), up=Matrix(up), down=Matrix(self.of(module.linear_fc2.weight))
        )


def _output_weight(model: Any) -> Tensor:
    if model.share_embeddings_and_output_weights:
        return model.embedding.word_embeddings.weight
    return model.output_layer.weight


def _paired(head_dim: int) -> Tensor:
    """[head_dim] where the model has what comes first, second, ... when pairs lie together."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def _rows(config: ModelConfig, tp: dist.ProcessGroup) -> Tensor:
    """Megatron splits the fused matrix by rows, also within a KV head, and each rank takes its
    query heads and the whole key and value from the gathered product."""
    ranks_per_key = tp.size() // config.num_kv_heads
    heads_per_key = config.num_heads // config.num_kv_heads
    key, part = divmod(tp.rank(), ranks_per_key)
    mine = heads_per_key // ranks_per_key
    first = key * (heads_per_key + 2)
    queries = torch.arange(first + part * mine, first + (part + 1) * mine)
    key_head = torch.tensor([first + heads_per_key])
    starts = torch.cat([queries, key_head])[:, None] * config.head_dim
    turned = (starts + _paired(config.head_dim)).flatten()
    value = (first + heads_per_key + 1) * config.head_dim + torch.arange(config.head_dim)
    return torch.cat([turned, value])
