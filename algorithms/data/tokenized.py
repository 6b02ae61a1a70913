"""Rows of a file as tokens with their masks, and what is wrong with those that cannot be.

Nothing ends the reading, so that a job can stop at the first bad row and a check can list them all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched

import torch

from algorithms.data.chat import ChatFormat, Part, TokenizedChat
from algorithms.data.examples import Example, Item, LabelledExample, Pair
from algorithms.data.length import fit
from service.spec.algorithm import RowKind
from service.spec.parts import Strings, TooLong
from service.spec.rows import (
    Conversation,
    Labelled,
    Preference,
    RawRow,
    RowFault,
    Text,
    VerifiablePrompt,
    check_format,
    format_of,
)

ROWS_AT_ONCE = 1000
"""Rows that the tokenizer is given in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How rows become tokens.

    Attributes:
        kind: what the algorithm takes.
        max_length: longest sequence, in tokens.
        too_long: what happens to a longer one.
        strings: what prompts and answers that are strings become.
    """

    kind: RowKind
    max_length: int
    too_long: TooLong = "refuse"
    strings: Strings = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRow:
    """What became of one row.

    Attributes:
        place: `line 7`.
        result: its tokens; what is wrong with it; None where the length rule dropped it.
        length: tokens of its longest sequence before the length rule; 0 where it has none.
        truncated: whether the length rule cut it.
    """

    place: str
    result: Item | RowFault | None
    length: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A row on its way: parsed, each of its texts in parts."""

    place: str
    row: Text | Preference | Labelled
    texts: Sequence[Sequence[Part]]


def tokenized_rows(
    rows: Iterable[RawRow], chat: ChatFormat, rules: Rules
) -> Iterator[TokenizedRow]:
    """What becomes of each row of a `RowFile`, in its order, some at a time.

    Raises:
        FileFault: the file holds no rows.
        OSError: the file cannot be read.
    """
    for chunk in batched((_split(row, chat, rules) for row in rows), ROWS_AT_ONCE):
        good = [one for one in chunk if isinstance(one, _Split)]
        encoded = iter(chat.tokenize([parts for one in good for parts in one.texts]))
        for one in chunk:
            if isinstance(one, _Split):
                yield _finish(one, [next(encoded) for _ in one.texts], rules)
            else:
                yield one


def _split(raw: RawRow, chat: ChatFormat, rules: Rules) -> _Split | TokenizedRow:
    if isinstance(raw.fields, RowFault):
        return TokenizedRow(place=raw.place, result=raw.fields)
    try:
        found = format_of(raw.fields)
        check_format(found, rules.kind)
        row = found.parse(raw.fields)
        if isinstance(row, VerifiablePrompt):
            raise RowFault("the row has no answer to train on")
        parts = [_parts(text, chat, rules.strings) for text in _texts(row)]
    except RowFault as fault:
        return TokenizedRow(place=raw.place, result=fault)
    return _Split(place=raw.place, row=row, texts=parts)


def _texts(row: Text | Preference | Labelled) -> list[Text]:
    if isinstance(row, Preference):
        return [row.chosen, row.rejected]
    return [row.answer] if isinstance(row, Labelled) else [row]


def _parts(text: Text, chat: ChatFormat, strings: Strings) -> list[Part]:
    if isinstance(text, Conversation):
        return chat.split(text)
    if strings == "plain":
        return chat.split_plain(text)
    if chat.end_of_turn in text.prompt:
        raise RowFault(
            f"the prompt contains {chat.end_of_turn!r}, so it went through a template already",
            "set `data.strings` to plain, or give messages",
        )
    messages = [
        {"role": "user", "content": text.prompt},
        {"role": "assistant", "content": text.answer},
    ]
    return chat.split(Conversation(messages=messages, trained=[False, True]))


def _finish(one: _Split, sequences: Sequence[TokenizedChat], rules: Rules) -> TokenizedRow:
    length = max(len(sequence.token_ids) for sequence in sequences)
    try:
        if isinstance(one.row, Preference):
            _check_prompts(*sequences)
        kept = fit(sequences, rules.max_length, rules.too_long)
    except RowFault as fault:
        return TokenizedRow(place=one.place, result=fault, length=length)
    if kept is None:
        return TokenizedRow(place=one.place, result=None, length=length)
    return TokenizedRow(
        place=one.place,
        result=_item(one.row, [_example(sequence) for sequence in kept]),
        length=length,
        truncated=kept is not sequences,
    )


def _check_prompts(chosen: TokenizedChat, rejected: TokenizedChat) -> None:
    prompts = [one.token_ids[: one.trained.index(1)] for one in (chosen, rejected)]
    if prompts[0] != prompts[1]:
        raise RowFault("the chat template renders the prompt differently for the two answers")


def _item(row: Text | Preference | Labelled, examples: Sequence[Example]) -> Item:
    if isinstance(row, Preference):
        return Pair(chosen=examples[0], rejected=examples[1], margin=row.margin or 0.0)
    if isinstance(row, Labelled):
        return LabelledExample(answer=examples[0], desirable=row.desirable)
    return examples[0]


def _example(chat: TokenizedChat) -> Example:
    return Example(
        tokens=torch.tensor(chat.token_ids, dtype=torch.int32),
        trained=torch.tensor(chat.trained, dtype=torch.uint8),
    )
