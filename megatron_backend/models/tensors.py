"""Hugging Face-named tensors, read in slices: from safetensors files, or drawn at random.

Imports ask for the rows or columns that their rank holds, one parameter at a time, so that no rank
ever holds more than one parameter beyond its own model.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_backend.models.mapping import head_tensor, tensor_shapes
from service.spec.algorithm import Head
from service.spec.model_config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class SafetensorsFolder:
    """A folder with `model.safetensors`, or with an index and several files.

    One file is open at a time: its pages are mapped into memory, and stay there while it is open.

    Raises:
        FileNotFoundError: the folder holds neither.
        ValueError: the index points out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_file: tuple[str, Any] | None = None
        index = folder / INDEX_FILE
        if index.is_file():
            self.file_of: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            # An export writes files of the same names: it must not leave its own folder.
            if outside := [file for file in self.file_of.values() if Path(file).name != file]:
                raise ValueError(f"{index} names files outside its folder: {_some(outside)}")
        elif (folder / SINGLE_FILE).is_file():
            self.file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise FileNotFoundError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "save the model with safe_serialization"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """See `TensorSource`; only the bytes of the slice are read."""
        if name not in self.file_of:
            raise KeyError(f"{self._folder} has no tensor {name!r}")
        view = self._open(self.file_of[name]).get_slice(name)
        index = [slice(None)] * len(view.get_shape())
        index[dim] = slice(start, stop)
        tensor: Tensor = view[tuple(index)]
        return tensor

    def check_complete(
        self, config: ModelConfig, head: Head = "vocabulary", *, new: Collection[str] = ()
    ) -> None:
        """Whether the folder holds the tensors of this model but those of `new`, and no others.

        A tensor that is left over is a part of a model that is not built here, so that the rest
        would give other logits than the whole. Copies of a tied output layer and tables of rotary
        frequencies, which older versions of transformers saved, are no such parts.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a tensor is left over.
        """
        score = head_tensor(config)
        if head == "vocabulary" and score in self:
            raise ValueError(
                f"{self._folder} holds a reward model: it has {score!r}, and predicts no tokens"
            )
        expected = tensor_shapes(config, head)
        if missing := [name for name in expected if name not in self and name not in new]:
            raise KeyError(f"{self._folder} has no tensor {_some(missing)}")
        extra = [
            name
            for name in self.file_of
            if name not in expected
            and not name.endswith(".rotary_emb.inv_freq")
            and not (name == "lm_head.weight" and (config.tied or head == "value"))
        ]
        if extra:
            raise ValueError(
                f"{self._folder} has tensors that no {config.family} model has: {_some(extra)}"
            )

    def _open(self, file: str) -> Any:
        if self._open_file is None or self._open_file[0] != file:
            self._open_file = None
            self._open_file = (file, safe_open(self._folder / file, framework="pt"))
        return self._open_file[1]


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


class RandomTensors:
    """A new model: the same weights from the same seed, whatever the layout.

    Each tensor has a random stream of its own, named by seed and tensor. The distribution is
    transformers' own: normal with `initializer_range` for matrices, zeros for biases, and norms
    that multiply by one.

    A value head is the exception: normal with a variance of 1 / (hidden_size + 1) (Stiennon et al.,
    arXiv 2009.01325, appendix B.1). The numbers of a hidden state behind a norm are about 1, so
    scores begin with a standard deviation of about 1 in a model of any width; `initializer_range`
    would have them grow with it. Were they all 0, the first step would train the head alone.
    """

    def __init__(self, config: ModelConfig, seed: int, head: Head = "vocabulary") -> None:
        self._config = config
        self._shapes = tensor_shapes(config, head)
        self._seed = seed

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """See `TensorSource`."""
        shape = self._shapes[name]
        if len(shape) > 1:
            digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            deviation = self._config.initializer_range
            if name == head_tensor(self._config):
                deviation = (self._config.hidden_size + 1) ** -0.5
            full = torch.empty(shape).normal_(std=deviation, generator=generator)
        elif name.endswith(".bias") or self._config.zero_centered_norm:
            full = torch.zeros(shape)
        else:
            full = torch.ones(shape)
        length = (shape[dim] if stop is None else stop) - start
        return full.narrow(dim, start, length)


class WithNewHead:
    """A folder's model with a value head that is drawn at random.

    Args:
        folder: of a model that predicts tokens.
        config: its config.
        seed: of the head.
    """

    def __init__(self, folder: SafetensorsFolder, config: ModelConfig, seed: int) -> None:
        self._folder = folder
        self._drawn = RandomTensors(config, seed, "value")
        self._head = head_tensor(config)
        folder.check_complete(config, "value", new=[self._head])

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """See `TensorSource`."""
        source = self._drawn if name == self._head else self._folder
        return source.read(name, dim, start, stop)
