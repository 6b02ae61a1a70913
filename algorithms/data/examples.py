"""A row as tokens, of each kind; small types, for there may be millions."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sequence. `tokens` [T] int32, `trained` [T] uint8."""

    tokens: Tensor
    trained: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt, whose tokens are the same in both.

    Attributes:
        chosen: prompt and the better answer.
        rejected: prompt and the other one.
        margin: by how much the first is better; 0 where the row does not say.
    """

    chosen: Example
    rejected: Example
    margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledExample:
    """Prompt and answer, and whether the answer is good."""

    answer: Example
    desirable: bool


type Item = Example | Pair | LabelledExample
"""What one row of a file becomes; all of a file are of one type."""


def sequences_of(item: Item) -> tuple[Example, ...]:
    """The sequences of one row, in the order of the batch."""
    if isinstance(item, Pair):
        return (item.chosen, item.rejected)
    return (item.answer,) if isinstance(item, LabelledExample) else (item,)
