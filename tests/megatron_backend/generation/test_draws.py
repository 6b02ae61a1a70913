"""Numbers by place: repeatable, independent of neighbours, uniform."""

import numpy as np

from megatron_backend.generation.draws import uniforms


def test_a_number_depends_on_seed_index_and_position_only() -> None:
    whole = uniforms(5, [0, 1, 2, 3], [10, 20, 30, 40], 6)
    part = uniforms(5, [2], [32], 3)
    assert np.array_equal(part[0], whole[2, 2:5])
    assert len(np.unique(np.concatenate([whole.ravel(), uniforms(6, [0], [10], 6)[0]]))) == 30


def test_the_numbers_are_uniform_and_uncorrelated() -> None:
    """100 bins of 40,000 numbers; 148.2 is the 0.999 quantile of chi-square with 99 degrees."""
    numbers = uniforms(1, range(400), [0] * 400, 100)
    assert numbers.min() > 0
    assert numbers.max() < 1
    observed = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((observed - 400) ** 2 / 400).sum() < 148.2
    for one, other in [(numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])]:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(one.size)
