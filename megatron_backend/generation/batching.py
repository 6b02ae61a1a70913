"""How a list of prompts becomes batches that fit in memory.

Prompts of like length go together, so that little of a batch is padding, and equal prompts (the
copies of a GRPO group) are prefilled once. A batch is as large as its keys, values and logits may
be; large batches are what makes decoding fast, since a step's cost hardly grows with its first
rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Some of the prompts of a call.

    Attributes:
        rows: indices into the call's list, one a row of the batch, equal prompts side by side.
        prompts: the different prompts of the batch, shortest first.
        owners: for each row, which of `prompts` it continues.
        limits: for each row, how many tokens it may have at most.
    """

    rows: list[int]
    prompts: list[Sequence[int]]
    owners: list[int]
    limits: list[int]

    @property
    def prompt_slots(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def slots(self) -> int:
        """Tokens that a row can come to, padding included."""
        return self.prompt_slots + max(self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """What batches may take.

    Attributes:
        bytes: of keys, values and logits together.
        bytes_per_token: of one sequence's keys and values.
        bytes_per_row: of one sequence's logits and what sampling makes of them.
    """

    bytes: int
    bytes_per_token: int
    bytes_per_row: int

    def rows(self, slots: int) -> int:
        """Rows of `slots` tokens that fit; at least one, for a batch must be possible."""
        return max(1, self.bytes // (self.bytes_per_token * slots + self.bytes_per_row))


def batches(
    prompts: Sequence[Sequence[int]], *, max_new_tokens: int, max_length: int, bound: MemoryBound
) -> Iterator[PromptBatch]:
    """Covers the list, each prompt once.

    Args:
        prompts: token ids, each shorter than `max_length`.
        max_new_tokens: tokens at most after one prompt.
        max_length: tokens at most in prompt and answer together.
        bound: of the memory of one batch.
    """
    order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), tuple(prompts[row])))
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and end - start < bound.rows(
            len(prompts[order[end]]) + max_new_tokens
        ):
            end += 1
        yield _batch(prompts, order[start:end], max_new_tokens, max_length)
        start = end


def _batch(
    prompts: Sequence[Sequence[int]], rows: list[int], max_new_tokens: int, max_length: int
) -> PromptBatch:
    different: list[Sequence[int]] = []
    owners = []
    for row in rows:
        if not different or list(different[-1]) != list(prompts[row]):
            different.append(prompts[row])
        owners.append(len(different) - 1)
    return PromptBatch(
        rows=rows,
        prompts=different,
        owners=owners,
        limits=[min(max_new_tokens, max_length - len(prompts[row])) for row in rows],
    )
