"""What a Hugging Face config says about a model, read strictly.

A setting that changes the maths and that we do not map is refused: a model that is a little
different from what its config says trains without an error, and is wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["llama", "qwen2", "qwen3"]

_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
_MAX_POSITIONS: dict[Family, int] = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}

# Settings that must have this value, or be absent: (name, value, what to say).
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("hidden_act", "silu", "only SwiGLU with silu is mapped"),
    ("attention_bias", False, "biases on all attention projections are not mapped"),
    ("mlp_bias", False, "biases in the MLP are not mapped"),
    ("attention_dropout", 0.0, "attention dropout is not mapped"),
    ("use_sliding_window", False, "sliding-window attention is not mapped"),
    ("partial_rotary_factor", 1.0, "rotary embeddings of a part of each head are not mapped"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embeddings.

    Attributes:
        theta: base of the frequencies.
        kind: `default`, `linear` (all frequencies divided by `factor`) or `llama3` (only the low
            ones, blended in between; Llama 3.1's rule).
        factor: how much longer contexts get.
        low_freq_factor, high_freq_factor, original_max_positions: `llama3`'s borders.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder of the Llama kind: RMSNorm, rotary embeddings, GQA, SwiGLU.

    Attributes:
        qkv_bias: biases on query, key and value (Qwen2).
        qk_norm: RMSNorm on each head's query and key (Qwen3).
        tied: the output layer is the embedding.
        initializer_range: standard deviation of random weights.
        hf: the config it was read from; exports write it back.
    """

    family: Family
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    initializer_range: float
    hf: Mapping[str, Any]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a config.json.

        Raises:
            ValueError: another family, a missing or impossible size, or a setting that is not
                mapped; the message names it.
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise ValueError(
                f"model_type {family!r} is not supported; the families are {', '.join(_FAMILIES)}"
            )
        _refuse_unmapped(config, family)
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads {num_kv_heads} does not divide "
                f"num_attention_heads {num_heads}"
            )
        head_dim = _size(config, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
        max_positions = _size(config, "max_position_embeddings", _MAX_POSITIONS[family])
        return cls(
            family=family,
            num_layers=_size(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            ffn_size=_size(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_size(config, "vocab_size"),
            max_positions=max_positions,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            initializer_range=float(config.get("initializer_range", 0.02)),
            hf=dict(config),
        )

    @property
    def rows_per_kv_head(self) -> int:
        """Rows of the fused QKV matrix that belong to one KV head: its queries, key and value."""
        return (self.num_heads // self.num_kv_heads + 2) * self.head_dim

    def check_layout(self, *, tp: int, pp: int) -> None:
        """Refuses a layout that this model cannot have.

        Raises:
            ValueError: names the size that does not divide.
        """
        for name, size in (
            ("num_attention_heads", self.num_heads),
            ("intermediate_size", self.ffn_size),
        ):
            if size % tp:
                raise ValueError(f"tp = {tp} does not divide {name} = {size}")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"tp = {tp} must divide num_key_value_heads = {self.num_kv_heads}, "
                "or be a multiple of it"
            )
        if self.num_layers < pp:
            raise ValueError(f"{self.num_layers} layers cannot fill pp = {pp} pipeline stages")


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the model config's {name} is {value!r}, but must be a positive integer")
    return value


def _refuse_unmapped(config: Mapping[str, Any], family: str) -> None:
    for name, value, reason in _FIXED:
        if config.get(name, value) not in (value, None):
            raise ValueError(f"the model config's {name} is {config[name]!r}: {reason}")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ValueError(
            f"the model config's layer_types has {', '.join(sorted(layer_types))}: "
            "only full attention is mapped"
        )
    if config.get("quantization_config"):
        raise ValueError(f"quantized {family} weights cannot be trained; use the original ones")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = config.get("rope_scaling") or parameters
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or not math.isfinite(theta) or theta <= 0:
        raise ValueError(f"the model config's rope_theta is {theta!r}, but must be positive")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rotary embeddings of a part of each head are not mapped")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind == "linear":
        return RopeConfig(theta=float(theta), kind="linear", factor=_number(scaling, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=float(theta),
            kind="llama3",
            factor=_number(scaling, "factor"),
            low_freq_factor=_number(scaling, "low_freq_factor"),
            high_freq_factor=_number(scaling, "high_freq_factor"),
            original_max_positions=int(_number(scaling, "original_max_position_embeddings")),
        )
    raise ValueError(
        f"rope scaling {kind!r} is not supported; the kinds are default, linear and llama3"
    )


def _number(scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"rope scaling's {name} is {value!r}, but must be a positive number")
    return float(value)
