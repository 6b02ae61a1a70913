"""Tokenized rows of one file, all checked before the first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from algorithms.data.chat import ChatFormat, TokenizedChat
from algorithms.data.jsonl import RowError, read_jsonl
from algorithms.data.rows import parse_conversation

TooLong = Literal["refuse", "drop", "truncate-left", "truncate-right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row. `tokens` [T] int32, `trained` [T] uint8; small types, for there may be millions."""

    tokens: Tensor
    trained: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Rows that are trained on, in file order, and what the length rule did to the others."""

    examples: Sequence[Example]
    dropped: int = 0
    truncated: int = 0


def load_dataset(
    path: str | Path, chat: ChatFormat, *, max_length: int, too_long: TooLong
) -> Dataset:
    """Reads, checks and tokenizes every row.

    A truncated row that keeps no trained token is dropped.

    Raises:
        RowError: a row is malformed, its mask cannot be made, or it is too long and `too_long` is
            `refuse`.
        ValueError: no row is left.
        OSError: the file cannot be read.
    """
    examples: list[Example] = []
    dropped = truncated = 0
    for line, row in read_jsonl(path):
        try:
            chat_tokens = chat.tokenize(parse_conversation(row))
        except ValueError as error:
            raise RowError(line, str(error)) from error
        if len(chat_tokens.token_ids) > max_length:
            if too_long == "refuse":
                raise RowError(
                    line,
                    f"{len(chat_tokens.token_ids)} tokens, but `training.max_length` is "
                    f"{max_length}; raise it, shorten the row, or set `data.too_long`",
                )
            shorter = _shorten(chat_tokens, max_length, too_long)
            if not any(shorter.trained[1:]):  # nothing predicts a sequence's first token
                dropped += 1
                continue
            chat_tokens = shorter
            truncated += 1
        examples.append(_example(chat_tokens))
    if not examples:
        raise ValueError("no row to train on" + (f": all {dropped} are too long" * bool(dropped)))
    return Dataset(examples=examples, dropped=dropped, truncated=truncated)


def _shorten(chat: TokenizedChat, max_length: int, too_long: TooLong) -> TokenizedChat:
    kept = {
        "drop": slice(0),
        "truncate-left": slice(-max_length, None),
        "truncate-right": slice(max_length),
    }[too_long]
    return TokenizedChat(token_ids=chat.token_ids[kept], trained=chat.trained[kept])


def _example(chat: TokenizedChat) -> Example:
    return Example(
        tokens=torch.tensor(chat.token_ids, dtype=torch.int32),
        trained=torch.tensor(chat.trained, dtype=torch.uint8),
    )
