"""Which groups a step is trained on, with a scripted generator of groups."""

from collections.abc import Callable, Sequence

import pytest

from algorithms.advantages.group import group_advantages
from algorithms.rollout.groups import (
    Drawn,
    Group,
    describe_shortage,
    draw_all,
    draw_with_spread,
)
from service.spec import DynamicSampling
from tests.algorithms.rollout.episodes import answer, group

SPREAD, EQUAL = (1.0, 0.0), (1.0, 1.0)


def _numbers(groups: Sequence[Group]) -> list[int]:
    return [found.item["number"] for found in groups]


def _draw(
    returns: Callable[[int], tuple[float | None, ...]], *, count: int, most: int
) -> tuple[Drawn, list[tuple[int, int, int]]]:
    """Draws with question i answered as `returns(i)` says; also what was asked for."""
    asked = []

    def play(start: int, wanted: int, number: int) -> list[Group]:
        asked.append((start, wanted, number))
        return [group(i, *returns(i)) for i in range(start, start + wanted)]

    return draw_with_spread(play, count, DynamicSampling(max_batches=most)), asked


@pytest.mark.parametrize(
    ("returns", "spread"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0, 1.0), False),
        ((0.3, 0.1 + 0.2, 0.3), False),
        ((0.0, 1e-5), True),
        ((1.0, None), False),
        ((None, None), False),
        ((1.0, None, 0.0), True),
        ((1e6, 1e6 + 1e-4), False),
    ],
)
def test_spread_is_what_a_group_s_advantages_are_made_of(
    returns: tuple[float | None, ...], spread: bool
) -> None:
    assert group(0, *returns).has_spread is spread
    advantages = group_advantages(list(returns), normalize_by_std=True)
    assert any(advantages) is spread


def test_i05_spread_is_of_whole_episodes() -> None:
    turns = Group(item={}, episodes=[answer(1.0, 0.0), answer(0.0, 1.0)])
    assert not turns.has_spread


def test_groups_without_spread_are_replaced_by_those_of_further_questions() -> None:
    # Questions 1, 2 and 5 teach nothing.
    drawn, asked = _draw(lambda i: EQUAL if i in (1, 2, 5) else SPREAD, count=4, most=5)
    # Half of four had spread: two are missing, so four are asked.
    assert asked == [(0, 4, 0), (4, 4, 1)]
    assert _numbers(drawn.trained) == [0, 3, 4, 6]
    assert (_numbers(drawn.masked), drawn.batches) == ([], 2)
    assert _numbers(drawn.played) == list(range(8))
    assert drawn.used == 7  # question 7 was played for nothing, and is asked again


def test_a_later_batch_goes_on_behind_the_last_question_and_is_no_larger_than_the_first() -> None:
    drawn, asked = _draw(lambda i: SPREAD if i % 4 == 3 else EQUAL, count=4, most=9)
    assert asked == [(0, 4, 0), (4, 4, 1), (8, 4, 2), (12, 4, 3)]
    assert (_numbers(drawn.trained), drawn.used) == ([3, 7, 11, 15], 16)
    few, asked = _draw(lambda i: EQUAL if i in (0, 10) else SPREAD, count=10, most=9)
    assert asked == [(0, 10, 0), (10, 2, 1)]  # one of ten is missing: ten ninths of one, or two
    assert (_numbers(few.trained)[-1], few.used) == (11, 12)


def test_a32_it_ends_after_the_batches_that_are_allowed() -> None:
    drawn, asked = _draw(lambda _: EQUAL, count=4, most=3)
    assert [wanted for _, wanted, _ in asked] == [4, 4, 4]
    assert (len(drawn.trained), len(drawn.masked), len(drawn.played)) == (0, 4, 12)
    assert (drawn.batches, drawn.used) == (3, 12)
    said = describe_shortage(drawn, best_reward=1.0)
    assert "only 0 of the 4 groups of the step" in said
    assert "after 12 questions in 3 batches" in said
    assert "of the 12 others, 12 have the best reward in every answer" in said


def test_a32_what_is_left_over_fills_the_batch_and_is_told_apart() -> None:
    outcomes: dict[int, tuple[float | None, ...]] = {
        0: SPREAD,
        1: EQUAL,
        2: (0.0, 0.0),
        3: (1.0, None),
    }
    drawn, _ = _draw(lambda i: outcomes.get(i, (0.5, 0.5)), count=4, most=2)
    assert _numbers(drawn.trained) == [0]
    assert _numbers(drawn.masked) == [1, 2, 3]
    assert _numbers(drawn.groups) == [0, 1, 2, 3]
    said = describe_shortage(drawn, best_reward=1.0)
    assert "only 1 of the 4 groups" in said
    assert "of the 7 others, 1 have the best reward in every answer, 1 have fewer than two" in said
    assert "and 5 the same lower reward in all" in said


def test_without_the_rule_a_batch_is_what_comes() -> None:
    drawn = draw_all(lambda start, count, _: [group(start + i, *EQUAL) for i in range(count)], 3)
    assert (_numbers(drawn.trained), drawn.masked, drawn.used) == ([0, 1, 2], [], 3)
