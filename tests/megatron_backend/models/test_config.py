"""Reading Hugging Face configs: what is mapped, and what is refused by name."""

from typing import Any

import pytest
import torch
import transformers

from megatron_backend.models.config import ModelConfig, RopeConfig
from megatron_backend.models.rope import inverse_frequencies
from tests.megatron_backend.small_models import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_read(name: str) -> None:
    hf = transformers.AutoConfig.for_model(**CONFIGS[name])
    config = ModelConfig.from_hf(hf.to_dict())
    assert config.hidden_size == hf.hidden_size
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.tied == hf.tie_word_embeddings
    assert config.qkv_bias == (hf.model_type == "qwen2")
    assert config.qk_norm == (hf.model_type == "qwen3")
    assert config.rope.theta == hf.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
    ],
)
def test_what_is_not_mapped_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(CONFIGS["llama"] | change)


def test_both_spellings_of_rope_scaling() -> None:
    old = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
    expected = RopeConfig(theta=10000.0, kind="linear", factor=4.0)
    assert ModelConfig.from_hf(CONFIGS["llama"] | old).rope == expected
    assert ModelConfig.from_hf(CONFIGS["llama"] | new).rope == expected


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies_equal_those_of_transformers(kind: str) -> None:
    parameters = {
        "rope_type": kind,
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, num_key_value_heads=1, rope_parameters=parameters
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    expected = LlamaRotaryEmbedding(hf).inv_freq
    config = ModelConfig.from_hf(hf.to_dict())
    torch.testing.assert_close(inverse_frequencies(config.rope, config.head_dim), expected)


def test_layouts_that_do_not_divide_are_refused() -> None:
    config = ModelConfig.from_hf(CONFIGS["llama"])
    config.check_layout(tp=4, pp=3)
    with pytest.raises(ValueError, match="tp = 3 does not divide num_attention_heads = 4"):
        config.check_layout(tp=3, pp=1)
    with pytest.raises(ValueError, match="3 layers cannot fill pp = 4"):
        config.check_layout(tp=1, pp=4)
    uneven = ModelConfig.from_hf(
        CONFIGS["llama"] | {"num_attention_heads": 12, "num_key_value_heads": 3}
    )
    with pytest.raises(ValueError, match="tp = 2 must divide num_key_value_heads = 3"):
        uneven.check_layout(tp=2, pp=1)
