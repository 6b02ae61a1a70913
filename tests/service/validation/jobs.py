"""Job specs and model configs for tests of the validator."""

from typing import Any

from service.spec import JobSpec
from service.spec.model_config import ModelConfig

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 30,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 50257,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def model(base: dict[str, Any] = DENSE, **changes: Any) -> ModelConfig:
    """A model of this config."""
    return ModelConfig.from_hf({**base, **changes})


def spec(*, online: bool = False, **parts: Any) -> JobSpec:
    """A job: SFT on a file, or GRPO in an environment."""
    base: dict[str, Any] = {"name": "a", "model": {"path": "tiny"}}
    if online:
        base |= {
            "algorithm": {"type": "grpo", "group_size": 8},
            "environment": {"id": "tools/calculator"},
            "training": {"steps": 3},
        }
    else:
        base |= {"algorithm": {"type": "sft"}, "data": {"train": "file-0123456789abcdef"}}
    return JobSpec.model_validate(base | parts)
