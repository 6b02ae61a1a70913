"""The small files of a Hugging Face model: config, tokenizer, how to generate. Free of torch."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
)
"""What a tokenizer may be made of; weights and configs that lie beside it are not copied."""
GENERATION_CONFIG = "generation_config.json"
"""Travels with the tokenizer: a model may end its turns at more tokens than its config names."""


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies a tokenizer's files and the generation config, where there is one, into a folder.

    Raises:
        FileNotFoundError: there is no tokenizer.
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{source} holds no tokenizer (any more)")
    if (source / GENERATION_CONFIG).is_file():
        found.append(GENERATION_CONFIG)
    for name in found:
        shutil.copyfile(source / name, target / name)


def write_config(config: Mapping[str, Any], target: Path) -> None:
    """Writes config.json into a folder."""
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
