"""Configs are read alike here and by the workers, and sizes count what a model really has."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_backend.models.config import ModelConfig
from service.validation.model_shape import read_shape
from tests.service.model_folders import CONFIG

BAD: list[dict[str, Any]] = [
    {"model_type": "mamba"},
    {"model_type": None},
    {"model_type": ["qwen2"]},
    {"hidden_size": 0},
    {"hidden_size": "64"},
    {"hidden_size": True},
    {"rms_norm_eps": "small"},
    {"initializer_range": [0.02]},
    {"rope_theta": 0},
    {"rope_theta": "1e4"},
    {"rope_scaling": {"rope_type": "linear"}},
    {"rope_scaling": {"rope_type": "linear", "factor": "two"}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"num_hidden_layers": None},
    {"vocab_size": -1},
    {"num_key_value_heads": 3},
    {"head_dim": 7},
    {"hidden_act": "gelu"},
    {"attention_bias": True, "model_type": "llama"},
    {"mlp_bias": True, "model_type": "llama"},
    {"attention_dropout": 0.1},
    {"use_sliding_window": True},
    {"layer_types": ["sliding_attention"]},
    {"quantization_config": {"bits": 4}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
]


def _config(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (CONFIG | changes).items() if value is not None}


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_what_the_workers_would_refuse_is_refused_at_submit(changes: dict[str, Any]) -> None:
    config = _config(changes)
    with pytest.raises((ValueError, TypeError)):
        ModelConfig.from_hf(config)
    shape, problems = read_shape(config, "model.init.config")
    assert shape is None
    assert problems
    for problem in problems:
        assert problem.field.startswith("model.init.config.")
        assert problem.fix


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 10**400},
        {"num_hidden_layers": 2**31},
        {"rope_theta": 10**400},
        {"rms_norm_eps": 0.0},
        {"tie_word_embeddings": "no"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_sizes_and_numbers_out_of_any_range_are_refused(changes: dict[str, Any]) -> None:
    shape, problems = read_shape(_config(changes), "model.path")
    assert shape is None
    (name,) = changes
    assert [problem.field for problem in problems] == [f"model.path.{name}"]
    assert len(problems[0].message) < 300
    assert problems[0].fix


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_and_parameters_are_those_of_the_real_model(family: str, tied: bool) -> None:
    config = _config({"model_type": family, "tie_word_embeddings": tied})
    shape, problems = read_shape(config, "model.path")
    assert problems == []
    assert shape is not None
    read_by_workers = ModelConfig.from_hf(config)
    assert shape.head_dim == read_by_workers.head_dim
    assert shape.positions == read_by_workers.max_positions
    arguments = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **arguments))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
