import math

import pytest
import torch

from algorithms.algorithm import load_algorithm
from service.spec import RemaxSpec
from tests.algorithms.reference_fixture import reference_fixture
from tests.algorithms.reference_loss import value_and_gradient
from tests.algorithms.rollouts import rollout_of


def test_the_greedy_answers_reward_is_the_baseline() -> None:
    rollout = rollout_of([[0.0, 1.0], [0.25], None], baselines=[0.5, 0.75, 0.5])
    credit = load_algorithm(RemaxSpec()).advantages(rollout)
    assert credit.advantages[0, 1:].tolist() == [0.5, 0.5]
    assert float(credit.advantages[1, 1]) == -0.5
    assert credit.metrics == {"better_than_greedy": 0.5}


def test_rewards_still_to_come_and_kl_on_the_way() -> None:
    """Turns that earn 1 and 2; weight 0.5, k1 of 0.2 at the last token; baseline 1.5."""
    rollout = rollout_of(
        [[1.0, 0.0, 2.0]],
        mask=[[1, 0, 1]],
        baselines=[1.5],
        old_log_probs=[[-1.0, math.nan, -1.0]],
        reference_log_probs=[[-1.0, math.nan, -1.2]],
    )
    credit = load_algorithm(RemaxSpec(kl_coef=0.5)).advantages(rollout)
    assert credit.advantages[0, [1, 3]].tolist() == pytest.approx([1.4, 0.4])
    assert credit.metrics["better_than_greedy"] == 1.0


def test_a06_a_question_whose_greedy_answer_has_no_score_has_no_advantage() -> None:
    rollout = rollout_of([[1.0], [1.0]], baselines=[math.nan, 0.5])
    credit = load_algorithm(RemaxSpec()).advantages(rollout)
    assert credit.advantages[:, 1].tolist() == [0.0, 0.5]
    assert credit.metrics == {"better_than_greedy": 1.0}


def test_a06_a_row_without_a_baseline_is_not_trained() -> None:
    rollout = rollout_of([[1.0], [0.5], [1.0], [1.0]], group_size=2)
    greedy = rollout_of([None, [0.25]])
    with_baselines = rollout.with_baselines(greedy)
    assert with_baselines.scored.tolist() == [False, False, True, True]
    assert with_baselines.baselines.nan_to_num(-1.0).tolist() == [-1.0, -1.0, 0.25, 0.25]


def test_without_baselines_it_says_so() -> None:
    with pytest.raises(ValueError, match="needs the rewards of greedy answers"):
        load_algorithm(RemaxSpec()).advantages(rollout_of([[1.0]]))


def test_the_loss_is_reinforce() -> None:
    """-A log p: verl's value without a ratio (its `gpg`), and the gradient -A / divisor."""
    value, _ = value_and_gradient(RemaxSpec(loss_aggregation="token-mean"))
    assert value == pytest.approx(0.8424325, abs=6e-8)
    batch, _ = reference_fixture()
    _, gradient = value_and_gradient(RemaxSpec())
    expected = -batch.per_token["advantages"] * batch.loss_mask / 6
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
