"""Small random models of each family, as transformers makes and saves them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 101,
    "initializer_range": 0.2,  # large enough that every weight matters to the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **_SIZES},
    "llama3-tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3_ROPE,
        **_SIZES,
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, **_SIZES},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, **_SIZES},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16, **_SIZES},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16, **_SIZES},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_parameters": _YARN_ROPE,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        **_SIZES,
    },
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        **_SIZES,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5, **_SIZES},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_SIZES,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        **_SIZES,
    },
    "qwen3_moe-normed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "head_dim": 16,
        **_SIZES,
    },
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 5,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,  # low enough that scores and logits feel them
        "final_logit_softcapping": 4.0,
        "pad_token_id": None,  # transformers would not train this token's embedding
        **_SIZES,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "pad_token_id": None,
        **_SIZES,
    },
}
"""Every family and every feature, by the names that tests use."""

DENSE = ("llama", "llama3-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")
"""Those without windows, experts and Gemma's peculiarities."""


def save_random(
    name: str,
    folder: Path,
    *,
    seed: int = 1,
    max_shard_size: str | int = "5GB",
    kind: Any = transformers.AutoModelForCausalLM,
    **changes: Any,
) -> transformers.PreTrainedModel:
    """A random model of transformers' own, in eval mode, and its files in `folder`.

    Biases and norms are random too: at their usual start (0 and 1) a wrong one would not show.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**(CONFIGS[name] | changes))
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
