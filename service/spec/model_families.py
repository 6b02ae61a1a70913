"""What each family's configs mean: the settings it has, and transformers' values where they say
nothing.

One record a family. The other half, which tensors its weights are made of, is one file a family in
the workers' `models/families`.
"""

from dataclasses import dataclass
from typing import Any, Literal

Family = Literal[
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text"
]
Activation = Literal["silu", "gelu_pytorch_tanh"]
Windows = Literal["never", "by_switch", "by_switch_everywhere", "everywhere", "by_layer"]

_COMMON: tuple[tuple[str, Any, str], ...] = (
    ("attention_bias", False, "biases on all attention projections are not supported"),
    ("mlp_bias", False, "biases in the MLP are not supported"),
    ("attention_dropout", 0.0, "attention dropout is not supported"),
    ("partial_rotary_factor", 1.0, "rotary embeddings of a part of each head are not supported"),
)
_SILU = ("hidden_act", "silu", "only SwiGLU with silu is supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRules:
    """How the configs of one family are read.

    Attributes:
        max_positions, kv_heads, head_dim, norm_eps, theta, tied: transformers' values where the
            config has none; `kv_heads` None is the number of heads, `head_dim` None is
            hidden_size / heads.
        activation: of the gated MLP.
        qkv_bias: biases on query, key and value.
        qk_norm: RMSNorm on each head's query and key.
        windows: which layers have sliding-window attention: `never`; `by_switch`, where
            use_sliding_window is true and from max_window_layers up; `by_switch_everywhere`, in
            all layers; `everywhere`, where sliding_window is a number; `by_layer`, as layer_types
            says.
        window: transformers' sliding_window where the config has none.
        window_pattern: with `by_layer`: every so-manieth layer has full attention.
        experts: a mixture of experts takes the MLP's place.
        expert_count: the setting that is the number of experts.
        expert_width: the setting that is the width of one expert.
        norm_topk_prob: the weights of a token's experts always sum to one; otherwise the config's
            setting of that name says so.
        gemma: norms multiply by 1 + weight and stand behind each block too, embeddings are
            multiplied by sqrt(hidden_size).
        local_theta: base of the rotary embedding in layers with a window; None is the same base.
        attention_softcap, final_softcap: transformers' values where the config has none.
        fixed: settings that may have one value only: name, value, why.
    """

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    tied: bool = False
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Windows = "never"
    window: int | None = None
    window_pattern: int = 2
    experts: bool = False
    expert_count: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    norm_topk_prob: bool = False
    gemma: bool = False
    local_theta: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    fixed: tuple[tuple[str, Any, str], ...] = (*_COMMON, _SILU)


_GEMMA = (
    *_COMMON,
    ("hidden_activation", "gelu_pytorch_tanh", "only GeGLU with tanh is supported"),
    ("use_bidirectional_attention", False, "only causal attention is supported"),
)

FAMILIES: dict[Family, FamilyRules] = {
    "llama": FamilyRules(max_positions=2048),
    "qwen2": FamilyRules(
        max_positions=32768, kv_heads=32, qkv_bias=True, windows="by_switch", window=4096
    ),
    "qwen3": FamilyRules(
        max_positions=32768,
        kv_heads=32,
        head_dim=128,
        qk_norm=True,
        windows="by_switch",
        window=4096,
    ),
    "qwen3_moe": FamilyRules(
        max_positions=32768,
        kv_heads=4,
        qk_norm=True,
        windows="by_switch_everywhere",
        window=4096,
        experts=True,
        fixed=(
            *_COMMON,
            _SILU,
            ("decoder_sparse_step", 1, "layers with and without experts are not supported"),
            ("mlp_only_layers", [], "layers with and without experts are not supported"),
        ),
    ),
    "mistral": FamilyRules(max_positions=131072, kv_heads=8, windows="everywhere", window=4096),
    "mixtral": FamilyRules(
        max_positions=131072,
        kv_heads=8,
        norm_eps=1e-5,
        theta=1_000_000.0,
        windows="everywhere",
        experts=True,
        expert_count="num_local_experts",
        expert_width="intermediate_size",
        norm_topk_prob=True,
        fixed=(
            *_COMMON,
            _SILU,
            ("router_jitter_noise", 0.0, "noise on the router's input is not supported"),
        ),
    ),
    "gemma2": FamilyRules(
        max_positions=8192,
        kv_heads=4,
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        windows="by_layer",
        window=4096,
        gemma=True,
        attention_softcap=50.0,
        final_softcap=30.0,
        fixed=_GEMMA,
    ),
    "gemma3_text": FamilyRules(
        max_positions=131072,
        kv_heads=4,
        head_dim=256,
        theta=1_000_000.0,
        tied=True,
        activation="gelu_pytorch_tanh",
        qk_norm=True,
        windows="by_layer",
        window=4096,
        window_pattern=6,
        gemma=True,
        local_theta=10_000.0,
        fixed=_GEMMA,
    ),
}
