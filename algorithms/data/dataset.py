"""Tokenized rows of one file, all checked before the first step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from algorithms.data.chat import ChatFormat, Part, TokenizedChat
from algorithms.data.jsonl import RowError, read_jsonl
from algorithms.data.rows import parse_conversation

ROWS_AT_ONCE = 1000
"""Rows that the tokenizer is given in one call."""

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
    for chunk in batched(_split_rows(path, chat), ROWS_AT_ONCE):
        tokenized = chat.tokenize([parts for _, parts in chunk])
        for (line, _), row in zip(chunk, tokenized, strict=True):
            fitting = _fit(row, line, max_length, too_long)
            if fitting is None:
                dropped += 1
            else:
                truncated += fitting is not row
                examples.append(_example(fitting))
    if not examples:
        raise ValueError("no row to train on" + (f": all {dropped} are too long" * bool(dropped)))
    return Dataset(examples=examples, dropped=dropped, truncated=truncated)


def _split_rows(path: str | Path, chat: ChatFormat) -> Iterator[tuple[int, list[Part]]]:
    for line, row in read_jsonl(path):
        try:
            yield line, chat.split(parse_conversation(row))
        except ValueError as error:
            raise RowError(line, str(error)) from error


def _fit(row: TokenizedChat, line: int, max_length: int, too_long: TooLong) -> TokenizedChat | None:
    """The row itself where it fits, else what the rule leaves of it."""
    length = len(row.token_ids)
    if length <= max_length:
        return row
    if too_long == "refuse":
        raise RowError(
            line,
            f"{length} tokens, but `training.max_length` is {max_length}; raise it, shorten the "
            "row, or set `data.too_long`",
        )
    kept = {
        "drop": slice(0),
        "truncate-left": slice(-max_length, None),
        "truncate-right": slice(max_length),
    }[too_long]
    shorter = TokenizedChat(token_ids=row.token_ids[kept], trained=row.trained[kept])
    # Nothing predicts a sequence's first token, so it is never trained.
    return shorter if any(shorter.trained[1:]) else None


def _example(chat: TokenizedChat) -> Example:
    return Example(
        tokens=torch.tensor(chat.token_ids, dtype=torch.int32),
        trained=torch.tensor(chat.trained, dtype=torch.uint8),
    )
