"""What a Hugging Face config says about a model: the one reading that service and workers share.

Every family is a decoder of RMSNorm, rotary embeddings, grouped queries and a gated MLP or a
mixture of such experts. Where families differ is a field of `ModelConfig`, never a test of the
family's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.spec.config_reader import ConfigReader, UnsupportedModel, shown
from service.spec.model_families import FAMILIES, Activation, Family, FamilyRules
from service.spec.model_windows import LayerType, read_windows
from service.spec.rope_config import RopeConfig, read_rope, read_two_ropes

MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A mixture of experts in the place of every layer's MLP; no expert is shared by all tokens.

    Attributes:
        num_experts: in each layer.
        top_k: experts that each token goes to.
        ffn_size: width of one expert.
        norm_topk_prob: the weights of a token's experts are scaled to a sum of 1. They are then the
            softmax over its own experts, else over all of them.
        aux_loss_coef: weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961,
            equation 4); 0 unless the config says output_router_logits, as in transformers.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    norm_topk_prob: bool
    aux_loss_coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama kind.

    Attributes:
        ffn_size: width of the MLP, where there is one (`moe` is None).
        rope: rotary embeddings, of layers with full attention where `local_rope` is not None.
        local_rope: rotary embeddings of the layers with a window (Gemma 3).
        tied: the output layer is the embedding.
        activation: of the gated MLP.
        qkv_bias: biases on query, key and value (Qwen2).
        qk_norm: RMSNorm on each head's query and key (Qwen3, Gemma 3).
        moe: the experts; None for a dense model.
        sliding_window: how many positions a token of a windowed layer sees, itself included.
        layer_types: of each layer; `sliding_attention` only where there is a sliding_window.
        zero_centered_norm: norms multiply by 1 + weight (Gemma).
        post_norms: attention and MLP have a norm behind them too, before the residual (Gemma).
        embedding_scale: what embeddings are multiplied by, before rounding to their dtype (Gemma).
        attention_softcap: scores become cap * tanh(score / cap), before the mask (Gemma 2).
        final_softcap: the same for logits (Gemma 2).
        query_scale: what scores are divided by the root of; head_dim but for Gemma.
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
    local_rope: RopeConfig | None
    tied: bool
    activation: Activation
    qkv_bias: bool
    qk_norm: bool
    moe: MoeConfig | None
    sliding_window: int | None
    layer_types: tuple[LayerType, ...]
    zero_centered_norm: bool
    post_norms: bool
    embedding_scale: float | None
    attention_softcap: float | None
    final_softcap: float | None
    query_scale: float
    initializer_range: float
    hf: Mapping[str, Any]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a config.json.

        Raises:
            UnsupportedModel: with every setting that is missing, impossible or not supported.
        """
        reader = ConfigReader(config)
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            message = f"model_type is {shown(family)}, which is not supported"
            fix = f"use a model of one of the families: {', '.join(FAMILIES)}"
            reader.refuse("model_type", message, fix)
            raise UnsupportedModel(reader.problems)
        model = _read(cls, reader, family, FAMILIES[family])
        if not reader.problems:
            _check_heads(reader, model)
        if reader.problems:
            raise UnsupportedModel(reader.problems)
        return model

    @property
    def rows_per_kv_head(self) -> int:
        """Rows of the fused QKV matrix that belong to one KV head: its queries, key and value."""
        return (self.num_heads // self.num_kv_heads + 2) * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What query times key is multiplied by.

        YaRN multiplies cosines and sines by its attention factor, which is the same as the square
        of it here, where nothing is recomputed for each token.
        """
        return float(self.query_scale**-0.5 * self.rope.attention_factor**2)

    def window_of(self, layer: int) -> int | None:
        """Positions that a token sees in `layer` (from 0), itself included; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention matrices."""
        return self.hidden_size * 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention: its matrices and biases, without head norms."""
        heads = self.num_heads + 2 * self.num_kv_heads
        return self.attention_weights + (heads * self.head_dim if self.qkv_bias else 0)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a layer's MLP, or of one expert."""
        return 3 * self.hidden_size * self.mlp_width[1]

    @property
    def mlp_width(self) -> tuple[str, int]:
        """What the config calls the width of the MLP, or of one expert, and how much it is."""
        if self.moe is None:
            return "intermediate_size", self.ffn_size
        return FAMILIES[self.family].expert_width, self.moe.ffn_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of a layer's norms, which every tensor-parallel rank holds in full."""
        blocks = 4 if self.post_norms else 2
        return blocks * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, all experts included."""
        mlp = self.mlp_parameters
        if self.moe is not None:
            mlp = self.moe.num_experts * (mlp + self.hidden_size)  # an expert, its router row
        return self.attention_parameters + mlp + self.norm_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without any padding of the vocabulary."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + embeddings + self.hidden_size

    def check_layout(self, *, tp: int, pp: int, ep: int = 1) -> None:
        """Refuses a layout that this model cannot have.

        Raises:
            ValueError: names the size that does not divide.
        """
        for name, size in (("num_attention_heads", self.num_heads), self.mlp_width):
            if size % tp:
                raise ValueError(f"tp = {tp} does not divide {name} = {size}")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"tp = {tp} must divide num_key_value_heads = {self.num_kv_heads}, "
                "or be a multiple of it"
            )
        if self.num_layers < pp:
            raise ValueError(f"{self.num_layers} layers cannot fill pp = {pp} pipeline stages")
        if self.moe is None and ep > 1:
            raise ValueError(f"ep = {ep}, but the model has no experts to spread")
        if self.moe is not None and self.moe.num_experts % ep:
            raise ValueError(f"ep = {ep} does not divide num_experts = {self.moe.num_experts}")


def _read(
    cls: type[ModelConfig], reader: ConfigReader, family: Family, rules: FamilyRules
) -> ModelConfig:
    config = reader.config
    for name, only, why in rules.fixed:
        reader.fixed(name, only, why)
    if config.get("quantization_config"):
        message, fix = "quantized weights cannot be trained", "use the original weights"
        reader.refuse("quantization_config", message, fix)
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    head_dim = reader.size("head_dim", rules.head_dim or max(hidden // heads, 1))
    if rules.local_theta is None:
        rope, local_rope = read_rope(reader, default_theta=rules.theta), None
    else:
        rope, local_rope = read_two_ropes(
            reader, default_theta=rules.theta, default_local_theta=rules.local_theta
        )
    num_layers = reader.size("num_hidden_layers", most=MAX_LAYERS)
    window, layer_types = read_windows(reader, rules, num_layers)
    kv_heads = rules.kv_heads if "num_key_value_heads" not in config else None
    return cls(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_size=reader.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=reader.size("num_key_value_heads", kv_heads or heads),
        head_dim=head_dim,
        vocab_size=reader.size("vocab_size"),
        max_positions=reader.size("max_position_embeddings", rules.max_positions),
        norm_eps=reader.number("rms_norm_eps", rules.norm_eps),
        rope=rope,
        local_rope=local_rope,
        tied=reader.boolean("tie_word_embeddings", rules.tied),
        activation=rules.activation,
        qkv_bias=rules.qkv_bias,
        qk_norm=rules.qk_norm,
        moe=_experts(reader, rules) if rules.experts else None,
        sliding_window=window,
        layer_types=layer_types,
        zero_centered_norm=rules.gemma,
        post_norms=rules.gemma,
        embedding_scale=hidden**0.5 if rules.gemma else None,
        attention_softcap=_softcap(
            reader, rules, "attn_logit_softcapping", rules.attention_softcap
        ),
        final_softcap=_softcap(reader, rules, "final_logit_softcapping", rules.final_softcap),
        query_scale=reader.number("query_pre_attn_scalar", 256) if rules.gemma else head_dim,
        initializer_range=reader.number("initializer_range", 0.02, zero=True),
        hf=dict(config),
    )


def _experts(reader: ConfigReader, rules: FamilyRules) -> MoeConfig:
    """The mixture of a family that has one; transformers also writes the number of experts under
    Mixtral's name for it."""
    alias = "num_local_experts"
    count = alias if alias in reader.config else rules.expert_count
    coefficient = reader.number("router_aux_loss_coef", 0.001, zero=True)
    experts = MoeConfig(
        num_experts=reader.size(count),
        top_k=reader.size("num_experts_per_tok"),
        ffn_size=reader.size(rules.expert_width),
        norm_topk_prob=rules.norm_topk_prob or reader.boolean("norm_topk_prob", False),
        aux_loss_coef=coefficient if reader.boolean("output_router_logits", False) else 0.0,
    )
    if experts.top_k > experts.num_experts:
        message = f"tokens go to {experts.top_k} of {experts.num_experts} experts"
        reader.refuse("num_experts_per_tok", message, "give at most the number of experts")
    return experts


def _softcap(
    reader: ConfigReader, rules: FamilyRules, name: str, default: float | None
) -> float | None:
    """A cap, None where the config says null; transformers looks at it in Gemma only."""
    value = reader.config.get(name, default)
    return reader.number(name, default) if rules.gemma and value is not None else None


def _check_heads(reader: ConfigReader, model: ModelConfig) -> None:
    if model.num_heads % model.num_kv_heads:
        reader.refuse(
            "num_key_value_heads",
            f"{model.num_kv_heads} KV heads do not divide {model.num_heads} attention heads",
            "each KV head must serve the same number of heads",
        )
    derived = reader.config.get("head_dim") is None and FAMILIES[model.family].head_dim is None
    if derived and model.hidden_size % model.num_heads:
        reader.refuse(
            "num_attention_heads",
            f"{model.num_heads} heads do not divide hidden_size {model.hidden_size}",
            "give head_dim, or a number of heads that divides it",
        )
    elif model.head_dim % 2:
        reader.refuse(
            "head_dim",
            f"head_dim is {model.head_dim}, which is odd",
            "rotary embeddings turn pairs of numbers: use an even head_dim",
        )
