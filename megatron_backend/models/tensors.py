"""Hugging Face-named tensors, read in slices: from safetensors files, or drawn at random.

Imports ask for the rows or columns that their rank holds, one tensor at a time, so that no rank
ever holds more than one tensor beyond its own model.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_backend.models.config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class TensorSource(Protocol):
    """Where the weights of a model come from, by their Hugging Face names."""

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start` to `stop` of `name` along `dim`.

        Raises:
            KeyError: there is no such tensor; the message says where it was looked for.
        """
        ...


class SafetensorsFolder:
    """A folder with `model.safetensors`, or with an index and several files.

    Raises:
        FileNotFoundError: the folder holds neither.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        index = folder / INDEX_FILE
        if index.is_file():
            self._file_of: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        elif (folder / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise FileNotFoundError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "save the model with safe_serialization"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """See `TensorSource`; only the bytes of the slice are read."""
        if name not in self._file_of:
            raise KeyError(f"{self._folder} has no tensor {name!r}")
        view = self._open(self._file_of[name]).get_slice(name)
        index = [slice(None)] * len(view.get_shape())
        index[dim] = slice(start, stop)
        tensor: Tensor = view[tuple(index)]
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt")
        return self._files[file]


class RandomTensors:
    """A new model: the same weights from the same seed, whatever the layout.

    Each tensor has a random stream of its own, named by seed and tensor. The distribution is
    transformers' own: normal with `initializer_range` for matrices, zeros for biases, ones for
    norms.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config = config
        self._shapes = tensor_shapes(config)
        self._seed = seed

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """See `TensorSource`."""
        shape = self._shapes[name]
        if name.endswith(".bias"):
            full = torch.zeros(shape)
        elif len(shape) == 1:
            full = torch.ones(shape)
        else:
            digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            full = torch.empty(shape).normal_(
                std=self._config.initializer_range, generator=generator
            )
        length = (shape[dim] if stop is None else stop) - start
        return full.narrow(dim, start, length)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that transformers saves for this model, in order."""
    hidden, ffn, head_dim = config.hidden_size, config.ffn_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_rows)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
