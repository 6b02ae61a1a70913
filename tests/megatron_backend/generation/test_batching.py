"""How prompts become batches."""

import pytest

from megatron_backend.generation.batching import MemoryBound, batches
from megatron_backend.generation.engine import check_prompts

WIDE = MemoryBound(bytes=1 << 30, bytes_per_token=8, bytes_per_row=8)


def test_equal_prompts_are_prefilled_once() -> None:
    prompts = [[1, 2], [3, 4, 5], [1, 2], [3, 4, 5], [1, 3]]
    [batch] = batches(prompts, max_new_tokens=4, max_length=6, bound=WIDE)
    assert batch.prompts == [[1, 2], [1, 3], [3, 4, 5]]
    assert [prompts[row] for row in batch.rows] == [batch.prompts[owner] for owner in batch.owners]
    assert sorted(batch.rows) == [0, 1, 2, 3, 4]
    assert batch.limits == [4, 4, 4, 3, 3]
    assert batch.slots == 3 + 4


def test_batches_stay_within_the_bound_and_cover_the_list() -> None:
    prompts = [[7] * length for length in (5, 1, 9, 2, 2, 8, 5)]
    bound = MemoryBound(bytes=60, bytes_per_token=1, bytes_per_row=10)
    found = list(batches(prompts, max_new_tokens=5, max_length=100, bound=bound))
    assert sorted(row for batch in found for row in batch.rows) == list(range(7))
    for batch in found:
        assert len(batch.rows) * (batch.slots + 10) <= 60
    assert len(found) > 1


def test_one_row_is_always_possible() -> None:
    tight = MemoryBound(bytes=1, bytes_per_token=8, bytes_per_row=8)
    found = list(batches([[1], [2]], max_new_tokens=1, max_length=4, bound=tight))
    assert [batch.rows for batch in found] == [[0], [1]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 41 is empty"),
        ([[1], [1] * 8], "prompt 41 has 8 tokens and leaves no room"),
        ([[1], [9]], "prompt 41 holds a token id outside the vocabulary of 9"),
        ([[1], [-1]], "prompt 41 holds a token id outside"),
        ([[1]], "1 prompts came with 2 indices"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(
    prompts: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_prompts(prompts, [40, 41], max_length=8, vocabulary_size=9)
