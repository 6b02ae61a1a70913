"""Weights and data that both sides of a benchmark read."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

type Size = Literal["tiny", "7M", "50M"]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    },
    "7M": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
    },
    "50M": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1664,
    },
}


def save_llama(size: Size, case: Path) -> None:
    """A random Llama in `case`/model; its logits are far enough apart that ties do not happen."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.05,
        **SIZES[size],
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).save_pretrained(case / "model")


def save_rows(size: Size, case: Path, *, rows: int, median: int = 100, most: int = 512) -> None:
    """Token ids in `case`/rows.json, with log-normal lengths from 16 to `most`."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(rows).log_normal_(
        float(torch.tensor(median).log()), 0.8, generator=generator
    )
    vocabulary = SIZES[size]["vocab_size"]
    tokens = [
        torch.randint(3, vocabulary, (int(length),), generator=generator).tolist()
        for length in lengths.clamp(16, most)
    ]
    (case / "rows.json").write_text(json.dumps(tokens), encoding="utf-8")


def save_prompts(size: Size, case: Path, *, count: int, length: int) -> None:
    """Random prompts of one length in `case`/prompts.json."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, SIZES[size]["vocab_size"], (count, length), generator=generator)
    (case / "prompts.json").write_text(json.dumps(prompts.tolist()), encoding="utf-8")


def read(case: Path, name: str) -> Any:
    """What one of the functions above wrote."""
    return json.loads((case / f"{name}.json").read_text(encoding="utf-8"))
