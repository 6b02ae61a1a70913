"""The tensors of a dense Megatron decoder, by what they do, for the decoder that keeps a cache.

They are read from the model anew for each call of `generate`, so a weight sync, which writes into
the model's parameters, can leave nothing stale behind.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer, this rank's shard. `n` is the number of query heads of one KV head.

    Attributes:
        attention_norm, mlp_norm: [hidden].
        qkv, qkv_bias: [KV heads * (n + 2) * head_dim, hidden]; of each KV head its queries, then
            its key, then its value.
        head_norm: [n + 1, head_dim], norm weights of queries and key; None without.
        projection: [hidden, heads * head_dim].
        gate_up: [2 * ffn, hidden], gate first.
        down: [hidden, ffn].
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    projection: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole decoder, this rank's shard.

    Attributes:
        group: the tensor-parallel group; None where there is one rank.
        embedding, output: [vocabulary / tp, hidden].
        layers: from the bottom.
        final_norm: [hidden].
        norm_epsilon: of every norm.
        queries_per_key: query heads of one KV head on this rank.
        kv_heads: KV heads on this rank.
        head_dim: size of one head.
        qkv_slots: where there are fewer KV heads than ranks: which of the gathered heads are this
            rank's queries, key and value.
        inverse_frequencies: [head_dim / 2], of the rotary embedding.
    """

    group: dist.ProcessGroup | None
    embedding: Tensor
    output: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    norm_epsilon: float
    queries_per_key: int
    kv_heads: int
    head_dim: int
    qkv_slots: Tensor | None
    inverse_frequencies: Tensor

    @classmethod
    def of(cls, model: Any) -> "DecoderWeights":
        """Reads a GPTModel that holds all its layers.

        Raises:
            NotImplementedError: the model has a part that the cached decoder does not know.
        """
        config = model.config
        _refuse_unknown(model)
        tp = model.pg_collection.tp.size()
        heads = config.num_attention_heads // tp
        kv_heads = max(config.num_query_groups // tp, 1)
        attention = [layer.self_attention for layer in model.decoder.layers]
        return cls(
            group=model.pg_collection.tp if tp > 1 else None,
            embedding=model.embedding.word_embeddings.weight.detach(),
            output=_output_weight(model).detach(),
            layers=[
                _layer(layer, queries_per_key=heads // kv_heads) for layer in model.decoder.layers
            ],
            final_norm=model.decoder.final_layernorm.weight.detach(),
            norm_epsilon=config.layernorm_epsilon,
            queries_per_key=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=attention[0].hidden_size_per_attention_head,
            qkv_slots=_slots(config, model.pg_collection.tp),
            inverse_frequencies=model.rotary_pos_emb.inv_freq,
        )


def _output_weight(model: Any) -> Tensor:
    if model.share_embeddings_and_output_weights:
        return model.embedding.word_embeddings.weight
    return model.output_layer.weight


def _layer(layer: Any, *, queries_per_key: int) -> LayerWeights:
    attention = layer.self_attention
    head_norm = None
    if attention.q_layernorm is not None:
        queries = attention.q_layernorm.weight.detach().expand(queries_per_key, -1)
        head_norm = torch.cat([queries, attention.k_layernorm.weight.detach()[None]])
    bias = attention.linear_qkv.bias
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=attention.linear_qkv.weight.detach(),
        qkv_bias=None if bias is None else bias.detach(),
        head_norm=head_norm,
        projection=attention.linear_proj.weight.detach(),
        mlp_norm=layer.pre_mlp_layernorm.weight.detach(),
        gate_up=layer.mlp.linear_fc1.weight.detach(),
        down=layer.mlp.linear_fc2.weight.detach(),
    )


def _slots(config: Any, tp: dist.ProcessGroup) -> Tensor | None:
    """Megatron splits the fused matrix by rows, also within a KV head, and each rank takes its
    query heads and the whole key and value from the gathered product."""
    if config.num_query_groups >= tp.size():
        return None
    ranks_per_key = tp.size() // config.num_query_groups
    heads_per_key = config.num_attention_heads // config.num_query_groups
    key, part = divmod(tp.rank(), ranks_per_key)
    mine = heads_per_key // ranks_per_key
    first = key * (heads_per_key + 2)
    queries = torch.arange(first + part * mine, first + (part + 1) * mine)
    return torch.cat([queries, first + heads_per_key + torch.arange(2)])


def _refuse_unknown(model: Any) -> None:
    config = model.config
    expected = {
        "num_moe_experts": None,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "window_size": None,
        "softmax_type": "vanilla",
        "sequence_parallel": False,
    }
    for name, value in expected.items():
        found = getattr(config, name)
        if found != value:
            raise NotImplementedError(
                f"the CPU's generation engine knows {name} = {value!r} only, not {found!r}"
            )
    if not (model.pre_process and model.post_process):
        raise NotImplementedError("the CPU's generation engine needs all layers on one rank")
