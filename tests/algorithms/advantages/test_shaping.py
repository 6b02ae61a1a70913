import math

import pytest
import torch

from algorithms.advantages.shaping import (
    length_penalties,
    less_at_the_end,
    mean_over_rows,
    sampled_kl,
)
from service.spec import OverlongPenalty
from tests.algorithms.rollouts import rollout_of


def test_penalties_that_trl_and_openrlhf_agree_on() -> None:
    lengths = (5, 6, 7, 8, 10, 12)
    rollout = rollout_of([[0.0] * length for length in lengths])
    overlong = OverlongPenalty(max_tokens=10, buffer_tokens=4)
    assert length_penalties(rollout, overlong).tolist() == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    double = overlong.model_copy(update={"penalty": 2.0})
    assert length_penalties(rollout, double).tolist() == [0.0, 0.0, 0.5, 1.0, 2.0, 2.0]


def test_only_tokens_of_the_policy_make_an_episode_long() -> None:
    rollout = rollout_of([[0.0] * 8], mask=[[1, 0, 0, 0, 0, 0, 1, 1]])
    overlong = OverlongPenalty(max_tokens=4, buffer_tokens=2)
    assert length_penalties(rollout, overlong).tolist() == [0.5]


def test_a30_it_goes_off_the_last_token_that_the_policy_wrote() -> None:
    rollout = rollout_of([[0.0, 1.0], [0.0, 0.0, 2.0], None], mask=[[1, 1], [1, 1, 0], [1]])
    shaped = less_at_the_end(rollout, torch.tensor([0.25, 0.5, math.nan]))
    expected = [[0.0, 0.0, 0.75, 0.0], [0.0, 0.0, -0.5, 2.0], [0.0, 0.0, 0.0, 0.0]]
    assert shaped.rewards.tolist() == expected
    assert rollout.rewards[0, 2] == 1.0  # the first one is as it was


def test_a07_kl_of_what_was_sampled_and_nothing_else() -> None:
    nan = math.nan
    rollout = rollout_of(
        [[0.0, 1.0], None],
        old_log_probs=[[math.log(0.5), math.log(0.5)], [nan]],
        reference_log_probs=[[math.log(0.25), math.log(0.5)], [math.inf]],
    )
    for estimator, value in (("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)):
        kl = sampled_kl(rollout, estimator)
        assert kl.tolist() == [[0.0, pytest.approx(value, abs=1e-6), 0.0], [0.0, 0.0, 0.0]]


def test_a06_means_are_over_scored_rows() -> None:
    rollout = rollout_of([[1.0], None, [1.0]])
    assert mean_over_rows(torch.tensor([2.0, math.nan, 4.0]), rollout) == 3.0
    assert mean_over_rows(torch.tensor([math.nan]), rollout_of([None])) == 0.0
