"""Advantages are those of TRL, verl and OpenRLHF, and what differs is derived."""

import math

import numpy as np
import pytest

from algorithms.advantages.group import STD_EPSILON
from algorithms.advantages.whitening import VARIANCE_EPSILON
from algorithms.algorithm import load_algorithm
from service.spec import (
    AlgorithmSpec,
    GrpoSpec,
    PpoSpec,
    ReinforcePlusPlusSpec,
)
from tests.parity.batches import BATCHES, Array, Inputs
from tests.parity.cases import BY_STD, GENERALIZED, ONE_A_ROW, PLUS_PLUS, PLUS_PLUS_AT_LAST, REMAX
from tests.parity.expected import Expected, agree, expected, parameters
from tests.parity.ours import at_last, rollout_of

EPSILONS = {"trl": 1e-4, "openrlhf": 1e-9}
"""Added to a group's deviation; verl's is ours."""


def _advantages(spec: AlgorithmSpec, inputs: Inputs, rewards: Array) -> Array:
    """Ours, [B, T], 0 where nothing is trained."""
    credit = load_algorithm(spec).advantages(rollout_of(inputs, rewards))
    return credit.advantages[:, 1:].double().numpy() * inputs.mask


def _of_rows(rows: Array, inputs: Inputs) -> Array:
    return rows[:, None] * inputs.mask


def _deviations(inputs: Inputs) -> Array:
    """[B] sample deviation of the scored rewards of each row's group; 0 where there is one."""
    found = np.zeros(len(inputs.mask))
    for group in np.unique(inputs.groups):
        rows = inputs.groups == group
        rewards = inputs.rewards[rows & inputs.trained_rows]
        found[rows] = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    return found


def _without_groups_of_one(rows: Array, expected: Expected) -> Array:
    """verl leaves the reward as it is where a group has one answer; ours is 0."""
    if expected.differs != "group-of-one":
        return rows
    inputs, kept = expected.inputs, rows.copy()
    for group in np.unique(inputs.groups):
        members = (inputs.groups == group) & inputs.trained_rows
        if members.sum() == 1:
            epsilon = STD_EPSILON if expected.settings["norm_adv_by_std_in_grpo"] else 0.0
            agree(rows[members], inputs.rewards[members] / (1.0 + epsilon))
            kept[members] = 0.0
    return kept


@pytest.mark.parametrize(("spec", "expected"), parameters(BY_STD))
def test_advantages_in_a_group(spec: AlgorithmSpec, expected: Expected) -> None:
    inputs = expected.inputs
    rows = _without_groups_of_one(expected.array("advantages"), expected)
    if expected.differs == "group-epsilon":
        deviations = _deviations(inputs)
        rows = rows * (deviations + EPSILONS[expected.package]) / (deviations + STD_EPSILON)
    agree(_advantages(spec, inputs, at_last(inputs)), _of_rows(rows, inputs))


@pytest.mark.parametrize(("spec", "expected"), parameters(ONE_A_ROW))
def test_advantages_of_rows(spec: AlgorithmSpec, expected: Expected) -> None:
    inputs = expected.inputs
    rows = _without_groups_of_one(expected.array("advantages"), expected)
    agree(_advantages(spec, inputs, at_last(inputs)), _of_rows(rows, inputs))


@pytest.mark.parametrize(("spec", "expected"), parameters(PLUS_PLUS))
def test_reinforce_plus_plus_with_rewards_of_tokens(
    spec: AlgorithmSpec, expected: Expected
) -> None:
    inputs = expected.inputs
    ours = _advantages(spec, inputs, inputs.token_rewards)
    agree(ours, expected.array("advantages") * inputs.mask)


@pytest.mark.parametrize(("spec", "expected"), parameters(PLUS_PLUS_AT_LAST))
def test_reinforce_plus_plus_with_one_reward_a_row(spec: AlgorithmSpec, expected: Expected) -> None:
    inputs, theirs = expected.inputs, expected.array("advantages")
    if expected.differs == "whitening-variance":
        theirs = _with_sample_variance(expected.array("returns"), theirs, inputs)
    agree(_advantages(spec, inputs, at_last(inputs)), theirs * inputs.mask)


def _with_sample_variance(returns: Array, theirs: Array, inputs: Inputs) -> Array:
    """OpenRLHF divides by n, and sets a floor to the variance; ours divides by n - 1 and adds."""
    count, kept = inputs.mask.sum(), returns[inputs.mask > 0]
    by_n = max(float(kept.var()), 1e-8)
    by_n_less_one = float(kept.var(ddof=1)) + VARIANCE_EPSILON
    assert count == len(kept)
    return theirs * math.sqrt(by_n / by_n_less_one)


@pytest.mark.parametrize("name", list(BATCHES))
def test_the_mean_of_a_group_of_one_is_its_reward(name: str) -> None:
    """By hand: verl leaves the reward as it is, ours leaves 0."""
    inputs = BATCHES[name]
    spec = ReinforcePlusPlusSpec(baseline="group", group_size=2)
    rollout = rollout_of(inputs, at_last(inputs), group_size=1)
    assert not load_algorithm(spec).advantages(rollout).advantages.any()


@pytest.mark.parametrize(("spec", "expected"), parameters(REMAX))
def test_remax(spec: AlgorithmSpec, expected: Expected) -> None:
    inputs = expected.inputs
    ours = _advantages(spec, inputs, inputs.token_rewards)
    agree(ours, expected.array("advantages") * inputs.mask)


@pytest.mark.parametrize(("spec", "expected"), parameters(GENERALIZED))
def test_generalized_advantages_and_returns(spec: PpoSpec, expected: Expected) -> None:
    """verl's advantages are whitened, OpenRLHF's are not yet: the other form is made by hand."""
    inputs = expected.inputs
    credit = load_algorithm(spec).advantages(rollout_of(inputs, inputs.token_rewards))
    assert credit.returns is not None
    agree(credit.returns[:, 1:].double().numpy() * inputs.mask, expected.array("returns"))
    if spec.whiten_advantages:
        whitened = "whitened" in expected.values
        theirs = expected.array("whitened") if whitened else _whitened(expected)
    else:
        theirs = expected.array("returns") - inputs.values * inputs.mask
    agree(credit.advantages[:, 1:].double().numpy() * inputs.mask, theirs)


def _whitened(expected: Expected) -> Array:
    mask, advantages = expected.inputs.mask, expected.array("advantages")
    kept = advantages[mask > 0]
    deviation = math.sqrt(kept.var(ddof=1) + VARIANCE_EPSILON)
    whitened: Array = (advantages - kept.mean()) / deviation * mask
    return whitened


@pytest.mark.parametrize("one", expected("kl-in-reward"), ids=lambda one: one.inputs.name)
def test_a_kl_in_the_reward_is_taken_off_each_token(one: Expected) -> None:
    """With lambda 1 a return is the sum of what is still to come: by hand from verl's rewards."""
    inputs = one.inputs
    spec = PpoSpec(kl_coef=0.05, gae_lambda=1.0)
    credit = load_algorithm(spec).advantages(rollout_of(inputs, inputs.token_rewards))
    shaped = one.array("rewards") * inputs.trained_rows[:, None]
    to_come = np.flip(np.flip(shaped, axis=1).cumsum(axis=1), axis=1)
    assert credit.returns is not None
    agree(credit.returns[:, 1:].double().numpy() * inputs.mask, to_come * inputs.mask)


@pytest.mark.parametrize("package", ["openrlhf", "trl", "verl"])
def test_a03_equal_rewards_but_for_rounding_are_exactly_0_here(package: str) -> None:
    """Elsewhere a rounding error is divided by an epsilon."""
    of_case = expected("group-advantages/by-std")
    one = next(e for e in of_case if e.package == package and e.inputs.name == "ragged")
    assert not _advantages(GrpoSpec(), one.inputs, at_last(one.inputs))[:4].any()
    theirs = np.abs(one.array("advantages")[:4])
    assert theirs.max() < 1e-6
    assert theirs.any()
