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
}


def save_random(name: str, folder: Path, *, seed: int = 1) -> transformers.PreTrainedModel:
    """A random model of transformers' own, in eval mode, and its files in `folder`.

    Biases and norms are random too: at their usual start (0 and 1) a wrong one would not show.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
