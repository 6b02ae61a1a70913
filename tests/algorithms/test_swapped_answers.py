"""Answers under the prompts of other rows: what each row gets, and what fits."""

import random

import pytest
import torch

from algorithms.batch import Batch
from algorithms.swapped_answers import answer_sources, swapped_answers
from tests.algorithms.answer_losses import prompted


def _rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Each row's tokens, and those of them that are trained."""
    return [
        (batch.tokens[i, : batch.lengths[i]].tolist(), batch.tokens[i][m > 0].tolist())
        for i, m in enumerate(batch.loss_mask)
    ]


@pytest.mark.parametrize("size", range(2, 12))
def test_a22_no_row_keeps_its_own_answer_and_each_answer_is_given_once(size: int) -> None:
    """Of odd sizes too: reversing [0, 1, 2] would leave row 1 its own."""
    sources = answer_sources(prompted(*(([i], [50 + i]) for i in range(size)), width=3))
    assert sorted(sources) == sorted(sources.values()) == list(range(size))
    assert all(row != other for row, other in sources.items())


def test_rows_that_share_a_prompt_do_not_swap_with_each_other() -> None:
    """As where a file lists a good and a bad answer to each question, or a row twice."""
    draw = random.Random(4)
    for _ in range(50):
        prompts = [0, 0, 0, 1, 1, 2, 3, 3]
        draw.shuffle(prompts)
        rows = [([prompt], [50 + draw.randrange(2)]) for prompt in prompts]
        sources = answer_sources(prompted(*rows, width=3))
        assert sorted(sources.values()) == list(range(8))
        assert all(prompts[row] != prompts[other] for row, other in sources.items())


def test_where_most_rows_share_a_prompt_no_row_keeps_its_own_answer() -> None:
    for prompts in ([0, 0, 0, 1], [0, 0, 0], [0, 0, 0, 0, 1, 1]):
        rows = [([prompt], [50 + i]) for i, prompt in enumerate(prompts)]
        sources = answer_sources(prompted(*rows, width=3))
        assert sorted(sources.values()) == list(range(len(prompts)))
        assert all(row != other for row, other in sources.items())


def test_the_sequences_do_not_depend_on_the_order_of_rows_nor_on_padding() -> None:
    rows = [([7, 3], [11, 12]), ([5], [13]), ([8, 2], [14]), ([6], [15, 1]), ([5], [16])]
    batch = prompted(*rows, width=9)
    expected = sorted(_rows(swapped_answers(batch)))
    for order in ([2, 0, 3, 4, 1], [4, 3, 2, 1, 0]):
        moved = swapped_answers(batch.rows(torch.tensor(order)))
        assert sorted(_rows(moved)) == expected
    assert sorted(_rows(swapped_answers(prompted(*rows, width=12)))) == expected


def test_two_rows_swap() -> None:
    batch = prompted(([1], [11, 12]), ([2, 3], [21]), width=8)
    assert _rows(swapped_answers(batch)) == [([1, 21], [21]), ([2, 3, 11, 12], [11, 12])]


def test_an_answer_is_all_from_its_first_trained_token_on() -> None:
    batch = prompted(([1], [11, 12, 13, 14]), ([2], [21]), width=6)
    batch.loss_mask[0, 3] = 0.0  # a tool's reply within the answer
    assert _rows(swapped_answers(batch))[1] == ([2, 11, 12, 13, 14], [11, 12, 14])


def test_a_prompt_that_leaves_no_room_is_cut_at_its_start() -> None:
    batch = prompted(([1, 2, 3, 4, 5], [11]), ([6], [21, 22, 23, 24]), width=6)
    assert _rows(swapped_answers(batch)) == [
        ([4, 5, 21, 22, 23, 24], [21, 22, 23, 24]),
        ([6, 11], [11]),
    ]


def test_rows_without_an_answer_take_no_part() -> None:
    batch = prompted(([1], [11]), ([2, 3], []), ([4], [31, 32]), width=4)
    assert _rows(swapped_answers(batch)) == [([1, 31, 32], [31, 32]), ([2, 3], []), ([4, 11], [11])]
    alone = prompted(([1], [11]), ([2, 3], []), width=4)
    assert _rows(swapped_answers(alone)) == [([1, 11], []), ([2, 3], [])]
    assert answer_sources(prompted(([1], []), ([2], []), width=3)) == {}
