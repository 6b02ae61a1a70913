"""pass@k, of groups and of turns."""

import pytest

from algorithms.rollout.statistics import baseline_metrics, episode_metrics, pass_rates
from tests.algorithms.rollout.episodes import answer, episode, turn


def test_h08_pass_at_k_is_of_whole_answers_in_either_form() -> None:
    of_turns = [[answer(0, 0, 1), answer(0, 0)]]
    of_answers = [[answer(1.0), answer(0.0)]]
    assert pass_rates(of_turns, best_reward=1.0) == {"pass_at_1": 0.5, "pass_at_2": 1.0}
    assert pass_rates(of_answers, best_reward=1.0) == {"pass_at_1": 0.5, "pass_at_2": 1.0}


def test_h08_the_estimate_has_no_bias() -> None:
    """Of four answers with one right one, 3 of the 6 pairs have it: by hand, not by 1 - (3/4)^2."""
    rates = pass_rates([[answer(value) for value in (1.0, 0.0, 0.0, 0.0)]], best_reward=1.0)
    assert rates == {"pass_at_1": 0.25, "pass_at_2": 0.5, "pass_at_4": 1.0}


def test_h08_pass_at_k_is_a_mean_over_questions_that_have_k_answers() -> None:
    answers = [
        [answer(1.0), answer(0.1 + 0.2 + 0.7), answer(0.5)],  # 1.0 but for rounding
        [answer(0.0), answer(None), answer(None)],
    ]
    rates = pass_rates(answers, best_reward=1.0)
    assert rates["pass_at_1"] == pytest.approx((2 / 3 + 0) / 2)
    assert rates["pass_at_2"] == 1.0
    assert rates["pass_at_3"] == 1.0
    assert pass_rates([[answer(None)]], best_reward=1.0) == {}
    assert pass_rates([], best_reward=1.0) == {}


def test_turns_without_a_stop_token_are_counted() -> None:
    episodes = [episode([turn([5], "length")], 0.0), episode([turn([5, 2])], 1.0)]
    assert episode_metrics(episodes)["unfinished_rate"] == 0.5


def test_baselines_that_were_not_scored_are_counted_and_are_not_zero() -> None:
    assert baseline_metrics([answer(0.5), answer(None)]) == {
        "baselines_unscored": 1,
        "baseline_reward_mean": 0.5,
    }
    assert baseline_metrics([answer(None)]) == {"baselines_unscored": 1}
    assert baseline_metrics([]) == {}
