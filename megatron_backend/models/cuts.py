"""How a Megatron parameter is made of Hugging Face tensors, and cut over tensor-parallel ranks.

A cut knows both directions: `load` reads one rank's part, `unite` takes the parts of all
tensor-parallel ranks and gives whole tensors back. Its names may be templates with `{layer}` and
`{expert}`, so that one cut describes a parameter of every layer; `at` fills them in.

The fused QKV matrix is where implementations differ, so it is spelled out. Megatron keeps each KV
head's queries, key and value together, e.g. for 4 query heads and 2 KV heads
[q0 q1 k0 v0 | q2 q3 k1 v1], and cuts these rows evenly over the tensor-parallel ranks. With 2 ranks
each has one whole group; with 4, rank 0 has q0 q1 and rank 1 has k0 v0, and Megatron gathers in the
forward pass. Cutting the interleaved rows is right in all cases; cutting q, k and v apart is not.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from service.spec.model_config import ModelConfig

Width = Literal["attention", "ffn", "expert"]
Shape = tuple[int, ...]


class TensorSource(Protocol):
    """Where the weights of a model come from, by their Hugging Face names."""

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start` to `stop` of `name` along `dim`.

        Raises:
            KeyError: there is no such tensor; the message says where it was looked for.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which of how many tensor-parallel parts, and how many rows a padded vocabulary has."""

    rank: int
    size: int
    padded_vocab: int

    def of(self, length: int) -> tuple[int, int]:
        """Start and stop of this part of `length` elements."""
        return length * self.rank // self.size, length * (self.rank + 1) // self.size


@dataclass(frozen=True, slots=True)
class Cut(ABC):
    """How a parameter is made of tensors.

    Attributes:
        names: of the Hugging Face tensors that it is made of.
    """

    names: tuple[str, ...]

    def at(self, *, layer: int, expert: int = 0) -> Self:
        """The same cut of one layer's (and one expert's) tensors."""
        return replace(
            self, names=tuple(name.format(layer=layer, expert=expert) for name in self.names)
        )

    @abstractmethod
    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """The whole tensors."""

    @abstractmethod
    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        """One rank's part."""

    @abstractmethod
    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Whole tensors by name, from the parts of all ranks in order."""


@dataclass(frozen=True, slots=True)
class Whole(Cut):
    """The same on every rank: a norm over the hidden size or over each head, a router, or the
    vector of a value head."""

    kind: Literal["hidden", "head", "router", "value"]

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        shape: Shape = (config.head_dim if self.kind == "head" else config.hidden_size,)
        if self.kind == "value":
            shape = (1, config.hidden_size)
        if self.kind == "router" and config.moe is not None:
            shape = (config.moe.num_experts, config.hidden_size)
        return {self.names[0]: shape}

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        del config, part
        return source.read(self.names[0])

    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        del config
        return {self.names[0]: parts[0]}


@dataclass(frozen=True, slots=True)
class Columns(Cut):
    """Input features over the ranks (row-parallel layers)."""

    width: Width

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return {self.names[0]: (config.hidden_size, width_of(config, self.width))}

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        return source.read(self.names[0], 1, *part.of(width_of(config, self.width)))

    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        del config
        return {self.names[0]: _joined(parts, dim=1)}


@dataclass(frozen=True, slots=True)
class VocabularyRows(Cut):
    """Tokens over the ranks; rows beyond the vocabulary are zeros, and belong to no file."""

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return {self.names[0]: (config.vocab_size, config.hidden_size)}

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        start, stop = part.of(part.padded_vocab)
        last = min(stop, config.vocab_size)
        real = source.read(self.names[0], 0, min(start, last), last)
        padding = stop - start - real.shape[0]
        if padding == 0:
            return real
        return torch.cat([real, real.new_zeros(padding, real.shape[1])])

    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        return {self.names[0]: _joined(parts)[: config.vocab_size]}


@dataclass(frozen=True, slots=True)
class GateAndUp(Cut):
    """A gated MLP's two matrices: each rank has its rows of the gate, then its rows of the other.

    `names` are the gate and the other one.
    """

    width: Width

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return dict.fromkeys(self.names, (width_of(config, self.width), config.hidden_size))

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        start, stop = part.of(width_of(config, self.width))
        return torch.cat([source.read(name, 0, start, stop) for name in self.names])

    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        del config
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return {name: _joined(half) for name, half in zip(self.names, halves, strict=True)}


@dataclass(frozen=True, slots=True)
class Qkv(Cut):
    """Queries, keys and values, interleaved by KV head (see the module's text).

    `names` are those of the three, weights or biases.
    """

    bias: bool = False

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        rows = [config.num_kv_heads * count for count in self._rows_per_kv_head(config)]
        columns = () if self.bias else (config.hidden_size,)
        return {name: (count, *columns) for name, count in zip(self.names, rows, strict=True)}

    def load(self, source: TensorSource, config: ModelConfig, part: Part) -> Tensor:
        group = config.rows_per_kv_head
        start, stop = part.of(group * config.num_kv_heads)
        first, last = start // group, -(-stop // group)
        groups = [
            source.read(name, 0, first * rows, last * rows).unflatten(0, (last - first, rows))
            for name, rows in zip(self.names, self._rows_per_kv_head(config), strict=True)
        ]
        return torch.cat(groups, dim=1).flatten(0, 1)[start - first * group : stop - first * group]

    def unite(self, parts: Sequence[Tensor], config: ModelConfig) -> dict[str, Tensor]:
        fused = _joined(parts).unflatten(0, (config.num_kv_heads, config.rows_per_kv_head))
        pieces = fused.split(self._rows_per_kv_head(config), dim=1)
        return {name: piece.flatten(0, 1) for name, piece in zip(self.names, pieces, strict=True)}

    def _rows_per_kv_head(self, config: ModelConfig) -> list[int]:
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        return [queries, config.head_dim, config.head_dim]


def width_of(config: ModelConfig, width: Width) -> int:
    """Features between the two matrices of a block."""
    if width == "attention":
        return config.num_heads * config.head_dim
    if width == "ffn":
        return config.ffn_size
    if config.moe is None:
        raise ValueError(f"a {config.family} model has no experts")
    return config.moe.ffn_size


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts side by side; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
