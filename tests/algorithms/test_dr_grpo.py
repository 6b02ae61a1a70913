import pytest

from algorithms.algorithm import load_algorithm
from service.spec import DrGrpoSpec
from tests.algorithms.reference_loss import value_and_gradient
from tests.algorithms.rollouts import rollout_of


def test_the_value_that_trl_and_verl_agree_on() -> None:
    value, _ = value_and_gradient(DrGrpoSpec(length_constant=8))
    assert value == pytest.approx(-0.0875121, abs=6e-8)


def test_it_divides_by_a_constant_and_by_nothing_else() -> None:
    """So twice the constant is half of value and gradient."""
    value, gradient = value_and_gradient(DrGrpoSpec(length_constant=8))
    half, half_gradient = value_and_gradient(DrGrpoSpec(length_constant=16))
    assert half == pytest.approx(value / 2, abs=1e-15)
    assert half_gradient.tolist() == (gradient / 2).tolist()


def test_a06_advantages_are_centred_and_not_scaled() -> None:
    rollout = rollout_of([[1.0], None, [0.0], [5.0], [3.0], [4.0]], group_size=3)
    credit = load_algorithm(DrGrpoSpec(group_size=3)).advantages(rollout)
    assert credit.advantages[:, 1].tolist() == [0.5, 0.0, -0.5, 1.0, -1.0, 0.0]
