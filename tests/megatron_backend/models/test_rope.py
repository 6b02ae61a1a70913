"""Rotary frequencies equal those of transformers, for every kind of scaling."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_backend.models.rope import inverse_frequencies
from service.spec.model_config import ModelConfig

LONGER = {"factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONGER},
        {"rope_type": "yarn", **LONGER},
        {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, **LONGER},
        {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.1, **LONGER},
        {"rope_type": "yarn", "attention_factor": 1.3, **LONGER},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    ],
    ids=str,
)
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    hf = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        num_key_value_heads=1,
        rope_parameters={"rope_theta": 500000.0, **parameters},
    )
    theirs = LlamaRotaryEmbedding(hf)
    config = ModelConfig.from_hf(hf.to_dict())
    torch.testing.assert_close(inverse_frequencies(config.rope, config.head_dim), theirs.inv_freq)
    assert config.rope.attention_factor == pytest.approx(theirs.attention_scaling)
