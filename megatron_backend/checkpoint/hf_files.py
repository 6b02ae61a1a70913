"""The small files of a Hugging Face model: its config and its tokenizer. Free of torch."""

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


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies a tokenizer's files, and nothing else, into a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{source} holds no tokenizer (any more)")
    for name in found:
        shutil.copyfile(source / name, target / name)


def write_config(config: Mapping[str, Any], target: Path) -> None:
    """Writes config.json into a folder."""
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
