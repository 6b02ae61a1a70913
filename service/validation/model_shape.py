"""The sizes that a Hugging Face config gives a model, as far as a submit can check them.

The workers read the same config with Megatron at hand (`megatron_backend.models.config`). This is
the torch-free half of that reading; a test feeds both the same bad configs.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.validation.problems import FieldProblem, quote

FAMILIES = ("llama", "qwen2", "qwen3")
MAX_SIZE = 2**31 - 1
ROPE_KINDS = ("default", "linear", "llama3")
_ROPE_FACTORS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
# What the families take where the config does not say.
_DEFAULT_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}

# Settings that change the maths and that the workers do not map: (name, the only value, why).
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("hidden_act", "silu", "only SwiGLU with silu is supported"),
    ("attention_bias", False, "biases on all attention projections are not supported"),
    ("mlp_bias", False, "biases in the MLP are not supported"),
    ("attention_dropout", 0.0, "attention dropout is not supported"),
    ("use_sliding_window", False, "sliding-window attention is not supported"),
    ("partial_rotary_factor", 1.0, "rotary embeddings of a part of each head are not supported"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder of the Llama kind."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    """The output layer is the embedding."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (query + 2 * key_value) + query * self.hidden
        biases = query + 2 * key_value if self.family == "qwen2" else 0
        head_norms = 2 * self.head_dim if self.family == "qwen3" else 0
        mlp = 3 * self.hidden * self.intermediate
        return attention + biases + head_norms + mlp + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without any padding of the vocabulary."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden


class _Reader:
    def __init__(self, config: Mapping[str, Any], field: str) -> None:
        self.config = config
        self.field = field
        self.problems: list[FieldProblem] = []

    def refuse(self, name: str, message: str, fix: str) -> None:
        self.problems.append(FieldProblem(field=f"{self.field}.{name}", message=message, fix=fix))

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; 1 where it is wrong, so that reading can go on."""
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE:
            return value
        shown = "missing" if value is None else quote(str(value))
        self.refuse(name, f"{name} is {shown}", f"give a whole number from 1 to {MAX_SIZE}")
        return 1

    def positive(self, values: Mapping[str, Any], name: str, path: str) -> None:
        """A positive number that a float can hold."""
        value = values.get(name)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value <= sys.float_info.max
        ):
            return
        shown = "missing" if value is None else quote(str(value))
        self.refuse(path, f"{name} is {shown}", "give a positive number")


def read_shape(
    config: Mapping[str, Any], field: str
) -> tuple[ModelShape | None, list[FieldProblem]]:
    """Reads a config.

    Args:
        config: as in config.json.
        field: what to call it in problems.

    Returns:
        The shape, or None and what is wrong.
    """
    reader = _Reader(config, field)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        shown = "missing" if family is None else quote(str(family))
        reader.refuse(
            "model_type",
            f"model_type is {shown}, which is not supported",
            f"use a model of one of the families: {', '.join(FAMILIES)}",
        )
        return None, reader.problems
    _refuse_unsupported(reader)
    for name in ("rms_norm_eps", "initializer_range", "rope_theta"):
        if name in config:
            reader.positive(config, name, name)
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        reader.refuse("tie_word_embeddings", "this is no boolean", "write true or false")
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    shape = ModelShape(
        family=family,
        layers=reader.size("num_hidden_layers"),
        hidden=hidden,
        intermediate=reader.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=reader.size("head_dim", 128 if family == "qwen3" else max(hidden // heads, 1)),
        vocabulary=reader.size("vocab_size"),
        positions=reader.size("max_position_embeddings", _DEFAULT_POSITIONS[family]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    if not reader.problems:
        _check_heads(reader, shape)
    return (None if reader.problems else shape), reader.problems


def _check_heads(reader: _Reader, shape: ModelShape) -> None:
    if shape.heads % shape.kv_heads:
        reader.refuse(
            "num_key_value_heads",
            f"{shape.kv_heads} KV heads do not divide {shape.heads} attention heads",
            "each KV head must serve the same number of heads",
        )
    derived = reader.config.get("head_dim") is None and shape.family != "qwen3"
    if derived and shape.hidden % shape.heads:
        reader.refuse(
            "num_attention_heads",
            f"{shape.heads} heads do not divide hidden_size {shape.hidden}",
            "give head_dim, or a number of heads that divides it",
        )
    elif shape.head_dim % 2:
        reader.refuse(
            "head_dim",
            f"head_dim is {shape.head_dim}, which is odd",
            "rotary embeddings turn pairs of numbers: use an even head_dim",
        )


def _refuse_unsupported(reader: _Reader) -> None:
    config = reader.config
    for name, only, why in _FIXED:
        if config.get(name, only) not in (only, None):
            reader.refuse(name, why, f"only {name} = {only!r} works")
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        reader.refuse("layer_types", "only full attention is supported", "use another model")
    if config.get("quantization_config"):
        reader.refuse(
            "quantization_config", "quantized weights cannot be trained", "use the original weights"
        )
    _check_rope(reader)


def _check_rope(reader: _Reader) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        rope = reader.config.get(name) or {}
        if not isinstance(rope, Mapping):
            reader.refuse(name, "this is no object", "write it as in the model's config.json")
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_KINDS:
            reader.refuse(
                name,
                f"the kind of rotary scaling {quote(str(kind))} is not supported",
                f"the kinds are: {', '.join(ROPE_KINDS)}",
            )
            continue
        if "rope_theta" in rope:
            reader.positive(rope, "rope_theta", f"{name}.rope_theta")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            reader.refuse(
                f"{name}.partial_rotary_factor",
                "rotary embeddings of a part of each head are not supported",
                "only 1.0 works",
            )
        for factor in _ROPE_FACTORS[kind]:
            reader.positive(rope, factor, f"{name}.{factor}")
