import pytest

from algorithms.schedule import learning_rate
from service.spec import OptimizerSpec


def _rates(total: int, **fields: object) -> list[float]:
    optimizer = OptimizerSpec.model_validate({"learning_rate": 1.0, **fields})
    return [learning_rate(optimizer, step, total) for step in range(1, total + 1)]


def test_constant_after_a_warm_up() -> None:
    assert _rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_falls_to_the_final_ratio_at_the_last_step() -> None:
    rates = _rates(6, warmup_steps=2, schedule="linear", final_ratio=0.2)
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    rates = _rates(4, schedule="cosine", final_ratio=0.1)
    assert rates[1] == pytest.approx(0.55)
    assert rates[3] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_step_has_no_rate(schedule: str) -> None:
    assert all(rate > 0 for rate in _rates(5, warmup_steps=9, schedule=schedule, final_ratio=0.0))
    assert _rates(1, schedule=schedule, final_ratio=0.5)[0] > 0
