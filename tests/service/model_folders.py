"""Small model folders on disk, as far as the service looks into them."""

import json
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def write_tokenizer(folder: Path, *, tokens: int = 40, chat_template: bool = True) -> Path:
    """A word-level tokenizer of so many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"w{index}": index for index in range(tokens)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": "{{ messages[0].content }}"} if chat_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_model(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder; a change to None leaves the setting out."""
    write_tokenizer(folder)
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": numpy.zeros(2, dtype=numpy.float32)}, folder / "model.safetensors")
    return folder


def write_reward_model(folder: Path, *, labels: int = 1, **changes: Any) -> Path:
    """As transformers saves a model that gives a sequence so many numbers."""
    names = {str(index): f"LABEL_{index}" for index in range(labels)}
    return write_model(
        folder, architectures=["Qwen2ForSequenceClassification"], id2label=names, **changes
    )
