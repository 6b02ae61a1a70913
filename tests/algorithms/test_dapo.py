import pytest

from algorithms.algorithm import load_algorithm
from service.spec import DapoSpec, DynamicSampling, GrpoSpec
from tests.algorithms.reference_loss import value_and_gradient
from tests.algorithms.rollouts import rollout_of


def test_the_value_that_trl_verl_and_openrlhf_agree_on() -> None:
    """A higher upper bound, and a mean over the tokens of the step."""
    value, _ = value_and_gradient(DapoSpec())
    assert value == pytest.approx(-0.2204289, abs=6e-8)


def test_it_is_grpo_with_its_own_defaults() -> None:
    value, gradient = value_and_gradient(DapoSpec(clip_low=0.1, clip_high=0.3))
    same, same_gradient = value_and_gradient(GrpoSpec(clip_low=0.1, clip_high=0.3))
    assert value == same
    assert gradient.tolist() == same_gradient.tolist()
    assert DapoSpec().resampling == DynamicSampling()


def test_a03_advantages_are_divided_by_the_sample_deviation() -> None:
    rollout = rollout_of([[1.0], [0.0], [0.0], [1.0]], group_size=4)
    credit = load_algorithm(DapoSpec(group_size=4)).advantages(rollout)
    expected = [0.866025, -0.866025, -0.866025, 0.866025]
    assert credit.advantages[:, 1].tolist() == pytest.approx(expected, abs=2e-6)
