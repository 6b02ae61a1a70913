import pytest

from algorithms.phases import PhaseClock
from algorithms.seeds import derive_seed


def test_a_phase_adds_up_and_is_counted_even_where_it_fails() -> None:
    entered: list[str] = []
    clock = PhaseClock(on_enter=entered.append)
    with clock("rollout"):
        pass
    first = clock.seconds()["seconds_rollout"]
    with pytest.raises(KeyError), clock("rollout"):
        raise KeyError
    assert clock.seconds()["seconds_rollout"] > first
    assert entered == ["rollout", "rollout"]
    assert set(clock.seconds()) == {"seconds_rollout"}


def test_seeds_differ_by_purpose_and_fit_a_generator() -> None:
    seeds = {derive_seed(1, "rollout", step) for step in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert derive_seed(1, "turn", 2) == derive_seed(1, "turn", 2) != derive_seed(12, "turn")
