import numpy as np
import pytest

from algorithms.advantages.group import group_advantages, has_spread


def test_a03_groups_are_normalised_on_their_own_by_the_sample_deviation() -> None:
    for group in ([1.0, 0.0], [5.0, 3.0]):
        assert group_advantages(group, normalize_by_std=True) == pytest.approx(
            [0.707107, -0.707107], abs=2e-6
        )
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize_by_std=True) == pytest.approx(
        [0.866025, -0.866025, -0.866025, 0.866025], abs=2e-6
    )


def test_a03_equal_rewards_give_exactly_zero_however_they_were_rounded() -> None:
    assert group_advantages([0.3, 0.3, 0.1 + 0.2, 0.3], normalize_by_std=True) == [0.0] * 4
    assert group_advantages([1e6, 1e6], normalize_by_std=False) == [0.0, 0.0]


def test_a03_one_answer_has_no_advantage_and_no_nan() -> None:
    assert group_advantages([1.0], normalize_by_std=True) == [0.0]
    assert group_advantages([None, 7.0], normalize_by_std=True) == [None, 0.0]


def test_a06_an_unscored_answer_is_left_out_and_is_not_zero() -> None:
    assert group_advantages([1.0, None, 0.0], normalize_by_std=False) == [0.5, None, -0.5]
    assert group_advantages([None, None, None], normalize_by_std=True) == [None, None, None]


def test_small_but_real_differences_are_kept() -> None:
    assert group_advantages([1e-3, 0.0], normalize_by_std=False) == pytest.approx([5e-4, -5e-4])
    first, second = group_advantages([0.001, 0.002], normalize_by_std=True)
    assert first == pytest.approx(-0.7061, abs=1e-4)  # the 1e-6 beside a deviation of 7e-4
    assert second == pytest.approx(0.7061, abs=1e-4)


def test_a03_float32_rewards_of_several_turns_are_equal_to_their_sum() -> None:
    """0.1 and 0.2 in float32 add up to 7e-9 less than 0.3 in float32."""
    in_two_turns = float(np.float32(0.1)) + float(np.float32(0.2))
    in_one = float(np.float32(0.3))
    assert in_two_turns != in_one
    assert group_advantages([in_two_turns, in_one], normalize_by_std=True) == [0.0, 0.0]
    assert not has_spread([in_two_turns, in_one])


def test_spread_is_among_scored_answers() -> None:
    assert has_spread([1.0, None, 0.0])
    assert not has_spread([1.0, None])
    assert not has_spread([None, None])
    assert not has_spread([])
