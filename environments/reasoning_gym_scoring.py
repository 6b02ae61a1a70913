"""Draws and scores reasoning-gym's items; runs in an isolated process and is called by name.

A scorer wants back the very entry that its dataset made, and some look at its types, so metadata
goes to JSON with tuples, sets, fractions, dates and NumPy values marked as what they are.
"""

import datetime
import json
import math
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import numpy as np
from reasoning_gym.factory import DATASETS

from environments.reasoning_gym_config import DatasetConfig, config_model, to_dataclass

CHUNK = 500
"""Items of one dataset object. Some datasets plan all their items ahead, so it never varies."""
_MARK = "$type"


def draw(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Items from number `first` on of a dataset whose first item has `seed`.

    Args:
        request: `dataset`, `config` (as JSON text), `seed`, `first`, `count`, and `seconds`, after
            which no further item is begun: the items so far are returned, at least one.
    """
    items: list[dict[str, Any]] = []
    until = time.monotonic() + request["seconds"]
    for index in range(request["first"], request["first"] + request["count"]):
        if items and time.monotonic() > until:
            break
        chunk, position = divmod(index, CHUNK)
        seed = request["seed"] + chunk * CHUNK
        entry = _dataset(request["dataset"], request["config"], seed)[position]
        # A few puzzles have many solutions and no answer of their own.
        answer = entry["answer"]
        items.append(
            {
                "question": entry["question"],
                "answer": answer if answer is None else str(answer),
                "metadata": encode(entry["metadata"]),
            }
        )
    return items


def score(request: Mapping[str, Any]) -> float:
    """The dataset's own score of an answer.

    Args:
        request: `dataset`, `config` (as JSON text), `item` and `answer`.

    Raises:
        ValueError: the scorer gave no number from 0 to 1.
    """
    item = request["item"]
    entry = {**item, "metadata": decode(item["metadata"])}
    dataset = _dataset(request["dataset"], request["config"], 0)
    value = float(dataset.score_answer(request["answer"], entry))
    if not 0 <= value <= 1:
        raise ValueError(f"the scorer gave {value}")
    return value


@lru_cache(maxsize=8)
def _dataset(name: str, config: str, seed: int) -> Any:
    dataset_class, _ = DATASETS[name]
    settings = _model(name).model_validate_json(config)
    return dataset_class(to_dataclass(settings, seed=seed, size=CHUNK))


@cache
def _model(name: str) -> type[DatasetConfig]:
    return config_model(name, DATASETS[name][1])


def encode(value: Any) -> Any:
    """A value as JSON, from which `decode` makes it again.

    Raises:
        TypeError: a type that is not known here.
    """
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_MARK: "float", "value": str(value)}
    if isinstance(value, list):
        return [encode(element) for element in value]
    if isinstance(value, dict):
        return _encode_dict(value)
    return _encode_marked(value)


def _encode_dict(value: dict[Any, Any]) -> Any:
    if all(isinstance(key, str) for key in value) and _MARK not in value:
        return {key: encode(element) for key, element in value.items()}
    pairs = [[encode(key), encode(element)] for key, element in value.items()]
    return {_MARK: "dict", "value": pairs}


def _encode_marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_MARK: "tuple", "value": [encode(element) for element in value]}
    if isinstance(value, set | frozenset):
        return {_MARK: "set", "value": sorted(map(encode, value), key=json.dumps)}
    if isinstance(value, Fraction):
        return {_MARK: "fraction", "value": str(value)}
    if isinstance(value, np.ndarray):
        return {_MARK: "array", "value": encode(value.tolist())}
    if isinstance(value, datetime.datetime):
        return {_MARK: "datetime", "value": value.isoformat()}
    if isinstance(value, datetime.date):
        return {_MARK: "date", "value": value.isoformat()}
    raise TypeError(f"no JSON form for {type(value).__name__}")


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "dict": lambda value: {decode(key): decode(element) for key, element in value},
    "tuple": lambda value: tuple(map(decode, value)),
    "set": lambda value: set(map(decode, value)),
    "float": float,
    "fraction": Fraction,
    "array": lambda value: np.array(decode(value)),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
}


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(element) for element in value]
    if not isinstance(value, dict):
        return value
    if _MARK in value:
        return _DECODERS[value[_MARK]](value["value"])
    return {key: decode(element) for key, element in value.items()}
