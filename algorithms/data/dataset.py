"""Tokenized rows of one file, all checked before the first step."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.data.chat import ChatFormat
from algorithms.data.examples import Item, sequences_of
from algorithms.data.tokenized import Rules, tokenized_rows
from service.spec.rows import RowError, RowFault, RowFile
from service.spec.rows.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Rows that are trained on, in file order, and what the length rule did to the others."""

    examples: Sequence[Item]
    dropped: int = 0
    truncated: int = 0

    def digest(self) -> str:
        """Of all tokens and masks, in order: the same wherever a model would read the same."""
        found = hashlib.blake2b(digest_size=16)
        for item in self.examples:
            for example in sequences_of(item):
                found.update(len(example.tokens).to_bytes(8, "little"))
                found.update(example.tokens.numpy().tobytes())
                found.update(example.trained.numpy().tobytes())
        return found.hexdigest()


def load_dataset(location: Location, chat: ChatFormat, rules: Rules) -> Dataset:
    """Reads, checks and tokenizes every row; only tokens are kept.

    A truncated row that keeps no trained token is dropped.

    Raises:
        RowError: a row is malformed, of another kind than the algorithm takes, its mask cannot be
            made, or it is too long and `too_long` is `refuse`.
        FileFault: the file holds no rows.
        ValueError: no row is left.
        OSError: the file cannot be read.
    """
    examples: list[Item] = []
    dropped = truncated = 0
    for row in tokenized_rows(RowFile(location), chat, rules):
        if isinstance(row.result, RowFault):
            raise RowError(row.place, row.result)
        if row.result is None:
            dropped += 1
        else:
            truncated += row.truncated
            examples.append(row.result)
    if not examples:
        raise ValueError(f"no row to train on: all {dropped} are too long")
    return Dataset(examples=examples, dropped=dropped, truncated=truncated)
