"""Rotary position embeddings as a config describes them, in the spellings of transformers 4 and 5.

Transformers 4 has `rope_theta` and `rope_scaling` beside each other; 5 has both in
`rope_parameters`, one for each kind of layer where they differ (Gemma 3).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from service.spec.config_reader import ConfigReader, shown

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embeddings.

    Attributes:
        theta: base of the frequencies.
        kind: `default`; `linear` (all frequencies divided by `factor`); `llama3` (only the low
            ones, blended in between; Llama 3.1's rule); `yarn` (the same idea with borders in
            rotations, and softer attention; arXiv 2309.00071).
        factor: how much longer contexts get.
        low_freq_factor, high_freq_factor: `llama3`'s borders, in rotations.
        original_max_positions: longest context before the scaling, for `llama3` and `yarn`.
        beta_fast, beta_slow: `yarn`'s borders, in rotations.
        truncate: `yarn`'s borders are rounded to whole dimensions.
        attention_factor: what cosines and sines are multiplied by; 1 for all kinds but `yarn`.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(reader: ConfigReader, *, default_theta: float) -> RopeConfig:
    """The rotary embeddings of a model that has one kind of them."""
    for name in ("rope_scaling", "rope_parameters"):
        values = reader.config.get(name)
        if values:
            return _read(reader, values, name, default_theta=default_theta)
    return RopeConfig(theta=reader.number("rope_theta", default_theta))


def read_two_ropes(
    reader: ConfigReader, *, default_theta: float, default_local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Those of the layers with full attention, and those of the layers with a window (Gemma 3)."""
    nested = reader.config.get("rope_parameters")
    if nested is not None and not isinstance(nested, Mapping):
        reader.refuse("rope_parameters", "this is no object", "write it as in the config.json")
        nested = None
    nested = nested or {}
    found = nested.get("full_attention") or {}
    if isinstance(found, Mapping):
        found = {**found, **(reader.config.get("rope_scaling") or {})}
    full = _read(reader, found, "rope_parameters.full_attention", default_theta=default_theta)
    local_theta = reader.number("rope_local_base_freq", default_local_theta)
    local = _read(
        reader,
        nested.get("sliding_attention") or {},
        "rope_parameters.sliding_attention",
        default_theta=local_theta,
        theta_name=None,
    )
    for rope, name in ((full, "full_attention"), (local, "sliding_attention")):
        if rope.kind not in ("default", "linear"):
            path = f"rope_parameters.{name}"
            message = f"rotary scaling {rope.kind!r} is not supported for one kind of layer only"
            reader.refuse(path, message, "use default or linear")
    return full, local


def _read(
    reader: ConfigReader,
    values: Any,
    path: str,
    *,
    default_theta: float,
    theta_name: str | None = "rope_theta",
) -> RopeConfig:
    """One object of settings; `theta_name` is where the config may have the base beside it."""
    if not isinstance(values, Mapping):
        reader.refuse(path, "this is no object", "write it as in the model's config.json")
        return RopeConfig(theta=default_theta)
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        message = "rotary embeddings of a part of each head are not supported"
        reader.refuse(f"{path}.partial_rotary_factor", message, "only 1.0 works")
    if theta_name is not None and values.get("rope_theta") is None:
        theta = reader.number(theta_name, default_theta)
    else:
        theta = reader.number("rope_theta", default_theta, within=values, path=f"{path}.rope_theta")
    kind = values.get("rope_type", values.get("type", "default"))

    def number(name: str, default: float | None = None) -> float:
        return reader.number(name, default, within=values, path=f"{path}.{name}")

    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, kind=kind, factor=number("factor"))
        case "llama3":
            return RopeConfig(
                theta=theta,
                kind=kind,
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_max_positions=int(number("original_max_position_embeddings")),
            )
        case "yarn":
            factor = number("factor")
            return RopeConfig(
                theta=theta,
                kind=kind,
                factor=factor,
                original_max_positions=int(number("original_max_position_embeddings")),
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
                truncate=values.get("truncate") is not False,
                attention_factor=number("attention_factor", _attention_factor(values, factor)),
            )
    message = f"the kind of rotary scaling {shown(kind)} is not supported"
    reader.refuse(path, message, f"the kinds are: {', '.join(ROPE_KINDS)}")
    return RopeConfig(theta=theta)


def _attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """YaRN's default (section 3.4 of its paper), and DeepSeek's variant with two scales."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weights = [values.get(name) for name in ("mscale", "mscale_all_dim")]
    own, everywhere = (w if isinstance(w, int | float) else 0 for w in weights)
    return scale(own) / scale(everywhere) if own and everywhere else scale(1.0)
