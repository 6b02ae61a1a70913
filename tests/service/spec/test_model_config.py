"""Model configs: read as transformers means them, or refused with the setting's name."""

from typing import Any

import pytest
import torch
import transformers

from service.spec.config_reader import UnsupportedModel
from service.spec.model_config import ModelConfig
from service.spec.model_families import FAMILIES
from service.spec.rope_config import RopeConfig
from tests.megatron_backend.small_models import CONFIGS

LLAMA = CONFIGS["llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_defaults_are_read_and_parameters_counted(family: str) -> None:
    """A config that says nothing but its sizes has transformers' values for the rest."""
    hf = transformers.AutoConfig.for_model(family)
    sizes = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size "
        "moe_intermediate_size num_experts num_local_experts num_experts_per_tok"
    )
    bare = {name: getattr(hf, name) for name in sizes.split() if hasattr(hf, name)}
    full = ModelConfig.from_hf(hf.to_dict())
    short = ModelConfig.from_hf({"model_type": family, **bare})
    for field in ModelConfig.__slots__:
        if field != "hf":
            assert getattr(short, field) == getattr(full, field), field
    smaller = transformers.AutoConfig.for_model(family, num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(smaller)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert ModelConfig.from_hf(smaller.to_dict()).parameters == count


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_read(name: str) -> None:
    hf = transformers.AutoConfig.for_model(**CONFIGS[name])
    config = ModelConfig.from_hf(hf.to_dict())
    assert config.hidden_size == hf.hidden_size
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.tied == hf.tie_word_embeddings
    with torch.device("meta"):
        attention = transformers.AutoModelForCausalLM.from_config(hf).model.layers[0].self_attn
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.softmax_scale == pytest.approx(
        attention.scaling * config.rope.attention_factor**2
    )
    kinds = getattr(hf, "layer_types", None)
    if kinds is not None:
        assert list(config.layer_types) == kinds


def test_windows_are_where_transformers_has_them() -> None:
    def windows(config: dict[str, Any]) -> list[int | None]:
        model = ModelConfig.from_hf(config)
        return [model.window_of(layer) for layer in range(model.num_layers)]

    mistral = LLAMA | {"model_type": "mistral"}
    assert windows(mistral) == [4096] * 3  # transformers' default: absent is not null
    assert windows(mistral | {"sliding_window": None}) == [None] * 3
    assert windows(LLAMA | {"sliding_window": 8}) == [None] * 3  # Llama has no such setting
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert windows(qwen) == [None] * 3
    assert windows(qwen | {"use_sliding_window": True}) == [None, 8, 8]
    gemma = LLAMA | {"model_type": "gemma2", "sliding_window": 8}
    assert windows(gemma) == [8, None, 8]
    gemma = LLAMA | {"model_type": "gemma3_text", "sliding_window": 8, "num_hidden_layers": 7}
    assert windows(gemma) == [8, 8, 8, 8, 8, None, 8]


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"model_type": "mamba"}, "model_type", "'mamba', which is not supported"),
        ({"model_type": ["llama"]}, "model_type", "not supported"),
        ({"hidden_size": None}, "hidden_size", "missing"),
        ({"hidden_size": 10**5000}, "hidden_size", "out of any range"),
        ({"vocab_size": -1}, "vocab_size", "-1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers", "1000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3 KV heads do not divide 4"),
        ({"head_dim": 7}, "head_dim", "odd"),
        ({"num_attention_heads": 6}, "num_attention_heads", "do not divide hidden_size 32"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
        ({"attention_bias": True}, "attention_bias", "True"),
        ({"mlp_bias": True}, "mlp_bias", "True"),
        ({"attention_dropout": 0.1}, "attention_dropout", "0.1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "no boolean"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps", "0.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "quantized"),
        ({"use_sliding_window": True}, "use_sliding_window", "no sliding windows"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types", "sliding_attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types", "full"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3},
            "layer_types",
            "no sliding window",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling", "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "missing"),
        ({"rope_scaling": [1]}, "rope_scaling", "no object"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.original_max_position_embeddings",
            "missing",
        ),
        ({"rope_theta": 0}, "rope_theta", "0"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
            "part of each head",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}
            | {"moe_intermediate_size": 16},
            "num_experts_per_tok",
            "5 of 4",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 16, "mlp_only_layers": [0]},
            "mlp_only_layers",
            "with and without experts",
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 2},
            "num_local_experts",
            "missing",
        ),
        (
            {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
            | {"original_max_position_embeddings": 8},
            "rope_parameters.full_attention",
            "yarn",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention",
            "causal",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    change: dict[str, Any], name: str, message: str
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        ModelConfig.from_hf(LLAMA | change)
    problems = {problem.name: problem for problem in refusal.value.problems}
    assert name in problems
    assert message in problems[name].message
    assert problems[name].fix
    assert len(str(refusal.value)) < 1000


def test_all_faults_are_found_at_once() -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        ModelConfig.from_hf(LLAMA | {"hidden_size": 0, "mlp_bias": True, "rope_theta": "x"})
    assert {problem.name for problem in refusal.value.problems} == {
        "hidden_size",
        "mlp_bias",
        "rope_theta",
    }


def test_both_spellings_of_rope_scaling() -> None:
    old = {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}}
    expected = RopeConfig(theta=20000.0, kind="linear", factor=4.0)
    assert ModelConfig.from_hf(LLAMA | old).rope == expected
    assert ModelConfig.from_hf(LLAMA | new).rope == expected
    gemma = LLAMA | {"model_type": "gemma3_text"}
    old = {
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }
    }
    for spelling in (old, new):
        config = ModelConfig.from_hf(gemma | spelling)
        assert config.rope == RopeConfig(theta=2e6, kind="linear", factor=8.0)
        assert config.local_rope == RopeConfig(theta=3e4)


def test_experts_are_read_in_both_spellings() -> None:
    mixtral = ModelConfig.from_hf(CONFIGS["mixtral"])
    assert mixtral.moe is not None
    assert (mixtral.moe.num_experts, mixtral.moe.top_k, mixtral.moe.ffn_size) == (4, 2, 48)
    assert mixtral.moe.norm_topk_prob
    assert mixtral.moe.aux_loss_coef == 0.0
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    qwen = ModelConfig.from_hf(CONFIGS["qwen3_moe"] | balanced)
    assert qwen.moe is not None
    assert (qwen.moe.num_experts, qwen.moe.top_k, qwen.moe.ffn_size) == (4, 2, 24)
    assert not qwen.moe.norm_topk_prob
    assert qwen.moe.aux_loss_coef == 0.02


def test_e05_layouts_that_do_not_divide_are_refused() -> None:
    config = ModelConfig.from_hf(LLAMA)
    config.check_layout(tp=4, pp=3)  # 2 KV heads: two ranks share one
    with pytest.raises(ValueError, match="tp = 3 does not divide num_attention_heads = 4"):
        config.check_layout(tp=3, pp=1)
    with pytest.raises(ValueError, match="3 layers cannot fill pp = 4"):
        config.check_layout(tp=1, pp=4)
    with pytest.raises(ValueError, match="ep = 2, but the model has no experts"):
        config.check_layout(tp=1, pp=1, ep=2)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}
    with pytest.raises(ValueError, match="tp = 2 must divide num_key_value_heads = 3"):
        ModelConfig.from_hf(LLAMA | heads).check_layout(tp=2, pp=1)
    experts = ModelConfig.from_hf(CONFIGS["mixtral"])
    experts.check_layout(tp=2, pp=1, ep=2)
    with pytest.raises(ValueError, match="ep = 3 does not divide num_experts = 4"):
        experts.check_layout(tp=1, pp=1, ep=3)


def test_the_width_of_an_expert_has_the_name_that_its_config_gives_it() -> None:
    widths = {name: ModelConfig.from_hf(config).mlp_width for name, config in CONFIGS.items()}
    assert widths["qwen3_moe"] == ("moe_intermediate_size", 24)
    assert widths["mixtral"] == ("intermediate_size", 48)
    wide = ModelConfig.from_hf(CONFIGS["mixtral"] | {"intermediate_size": 49})
    with pytest.raises(ValueError, match="tp = 2 does not divide intermediate_size = 49"):
        wide.check_layout(tp=2, pp=1)
