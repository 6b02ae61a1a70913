"""Which Megatron parameter is made of which Hugging Face tensors: a table, and four ways to cut.

A parameter is looked up by its name in the model. Its cut knows both directions: `load` reads one
rank's part, `unite` takes the parts of all tensor-parallel ranks and gives whole tensors back.

The fused QKV matrix is where implementations differ, so it is spelled out. Megatron keeps each KV
head's queries, key and value together, e.g. for 4 query heads and 2 KV heads
[q0 q1 k0 v0 | q2 q3 k1 v1], and cuts these rows evenly over the tensor-parallel ranks. With 2 ranks
each has one whole group; with 4, rank 0 has q0 q1 and rank 1 has k0 v0, and Megatron gathers in the
forward pass. Cutting the interleaved rows is right in all cases; cutting q, k and v apart is not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_backend.models.config import ModelConfig
from megatron_backend.models.tensors import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which of how many tensor-parallel parts, and how many rows a padded vocabulary has."""

    rank: int
    size: int
    padded_vocab: int

    def of(self, length: int) -> tuple[int, int]:
        """Start and stop of this part of `length` elements."""
        return length * self.rank // self.size, length * (self.rank + 1) // self.size


class Cut(Protocol):
    """How a parameter is cut over tensor-parallel ranks."""

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face tensors that it is made of."""
        ...

    def load(self, source: TensorSource, config: ModelConfig, part: Part, /) -> Tensor:
        """One rank's part."""
        ...

    def unite(self, parts: Sequence[Tensor], config: ModelConfig, /) -> dict[str, Tensor]:
        """Whole tensors by Hugging Face name, from the parts of all ranks in order."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """The same on every rank."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def load(self, source: TensorSource, _config: ModelConfig, _part: Part) -> Tensor:
        return source.read(self.name)

    def unite(self, parts: Sequence[Tensor], _config: ModelConfig) -> dict[str, Tensor]:
        return {self.name: parts[0]}


@dataclass(frozen=True, slots=True)
class Columns:
    """Input features over the ranks (row-parallel layers)."""

    name: str
    width: str
    """Which product of the config the full width is: `attention` or `ffn`."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        attention = config.num_heads * config.head_dim
        start, stop = part.of(config.ffn_size if self.width == "ffn" else attention)
        return source.read(self.name, 1, start, stop)

    def unite(self, parts: Sequence[Tensor], _config: ModelConfig) -> dict[str, Tensor]:
        return {self.name: torch.cat(list(parts), dim=1)}


@dataclass(frozen=True, slots=True)
class VocabularyRows:
    """Tokens over the ranks; rows beyond the vocabulary are zeros, and belong to no file."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        start, stop = part.of(part.padded_vocab)
        real = source.read(
            self.name, 0, min(start, config.vocab_size), min(stop, config.vocab_size)
        )
        return torch.cat([real, real.new_zeros(stop - start - real.shape[0], real.shape[1])])

    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        return {self.name: torch.cat(list(parts))[: config.vocab_size]}


@dataclass(frozen=True, slots=True)
class GateAndUp:
    """SwiGLU's two matrices: each rank has its rows of the gate, then its rows of the other."""

    gate: str
    up: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.gate, self.up)

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        start, stop = part.of(config.ffn_size)
        return torch.cat([source.read(name, 0, start, stop) for name in (self.gate, self.up)])

    def unite(self, parts: Sequence[Tensor], _config: ModelConfig) -> dict[str, Tensor]:
        halves = [part.chunk(2) for part in parts]
        return {
            self.gate: torch.cat([gate for gate, _ in halves]),
            self.up: torch.cat([up for _, up in halves]),
        }


@dataclass(frozen=True, slots=True)
class Qkv:
    """Queries, keys and values, interleaved by KV head (see the module's text)."""

    query: str
    key: str
    value: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.query, self.key, self.value)

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        group = config.rows_per_kv_head
        start, stop = part.of(group * config.num_kv_heads)
        first, last = start // group, -(-stop // group)
        groups = [
            source.read(name, 0, first * rows, last * rows).unflatten(0, (last - first, rows))
            for name, rows in self._rows(config)
        ]
        return torch.cat(groups, dim=1).flatten(0, 1)[start - first * group : stop - first * group]

    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        fused = torch.cat(list(parts)).unflatten(0, (config.num_kv_heads, config.rows_per_kv_head))
        names_and_rows = self._rows(config)
        pieces = fused.split([rows for _, rows in names_and_rows], dim=1)
        return {
            name: piece.flatten(0, 1)
            for (name, _), piece in zip(names_and_rows, pieces, strict=True)
        }

    def _rows(self, config: ModelConfig) -> list[tuple[str, int]]:
        """Each tensor's name, and how many of its rows belong to one KV head."""
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        return [(self.query, queries), (self.key, config.head_dim), (self.value, config.head_dim)]


def _layer_cuts(config: ModelConfig, prefix: str) -> dict[str, Cut]:
    """A layer's parameters. Norms have two names: apart, or fused into the next linear layer."""
    attention = prefix + "self_attn."
    input_norm = Whole(prefix + "input_layernorm.weight")
    mlp_norm = Whole(prefix + "post_attention_layernorm.weight")
    cuts: dict[str, Cut] = {
        "input_layernorm.weight": input_norm,
        "self_attention.linear_qkv.layer_norm_weight": input_norm,
        "pre_mlp_layernorm.weight": mlp_norm,
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "self_attention.linear_proj.weight": Columns(attention + "o_proj.weight", "attention"),
        "mlp.linear_fc1.weight": GateAndUp(
            prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"
        ),
        "mlp.linear_fc2.weight": Columns(prefix + "mlp.down_proj.weight", "ffn"),
    }
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        names = [f"{attention}{name}_proj.{kind}" for name in "qkv"]
        cuts[f"self_attention.linear_qkv.{kind}"] = Qkv(*names)
    if config.qk_norm:
        cuts["self_attention.q_layernorm.weight"] = Whole(attention + "q_norm.weight")
        cuts["self_attention.k_layernorm.weight"] = Whole(attention + "k_norm.weight")
    return cuts


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def cut_of(config: ModelConfig, name: str, *, first_layer: int = 0) -> Cut:
    """The cut of one parameter.

    Args:
        config: the model.
        name: the parameter's name in this rank's model, where layers count from 0.
        first_layer: number of this pipeline stage's first layer in the whole model.

    Raises:
        KeyError: no tensor is mapped to this parameter.
    """
    ends: dict[str, Cut] = {
        "embedding.word_embeddings.weight": VocabularyRows("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": Whole("model.norm.weight"),
        "output_layer.weight": VocabularyRows(
            "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        ),
    }
    layer = _LAYER.fullmatch(name)
    cuts = ends
    if layer is not None:
        cuts = _layer_cuts(config, f"model.layers.{first_layer + int(layer[1])}.")
    key = layer[2] if layer is not None else name
    if key not in cuts:
        raise KeyError(f"no Hugging Face tensor is mapped to Megatron's parameter {name!r}")
    return cuts[key]
