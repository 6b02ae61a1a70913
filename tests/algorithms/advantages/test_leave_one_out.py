import pytest

from algorithms.advantages.leave_one_out import leave_one_out_advantages


def test_values_that_the_references_agree_on() -> None:
    assert leave_one_out_advantages([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])
    assert leave_one_out_advantages([2.0, 2.0, -1.0]) == pytest.approx([1.5, 1.5, -3.0])


def test_a06_an_unscored_answer_is_left_out_and_is_not_zero() -> None:
    assert leave_one_out_advantages([1.0, None, 0.0]) == [1.0, None, -1.0]
    assert leave_one_out_advantages([None, None, None]) == [None, None, None]


def test_a03_one_scored_answer_has_no_baseline_and_no_nan() -> None:
    assert leave_one_out_advantages([7.0]) == [0.0]
    assert leave_one_out_advantages([None, 7.0]) == [None, 0.0]


def test_a03_equal_rewards_give_exactly_zero_however_they_were_rounded() -> None:
    assert leave_one_out_advantages([0.3, 0.1 + 0.2, 0.3]) == [0.0] * 3


def test_it_is_the_centred_reward_times_n_over_n_minus_one() -> None:
    rewards = [0.3, -2.0, 5.0, 1.25]
    mean = sum(rewards) / 4
    expected = [(reward - mean) * 4 / 3 for reward in rewards]
    assert leave_one_out_advantages(rewards) == pytest.approx(expected)
