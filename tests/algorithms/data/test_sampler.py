from collections import Counter

import pytest

from algorithms.data.sampler import Sampler


def test_d03_a_resumed_run_draws_what_the_whole_one_would_have() -> None:
    whole = Sampler(100, seed=1)
    drawn = [whole.draw(10).indices for _ in range(20)]
    first = Sampler(100, seed=1)
    before = [first.draw(10).indices for _ in range(7)]
    resumed = Sampler(100, seed=1, position=first.position)
    assert before + [resumed.draw(10).indices for _ in range(13)] == drawn
    for epoch in (drawn[:10], drawn[10:]):
        assert sorted(index for batch in epoch for index in batch) == list(range(100))
    assert drawn[:10] != drawn[10:]


def test_batches_keep_their_size_and_no_row_is_lost() -> None:
    sampler = Sampler(10, seed=3)
    draws = [sampler.draw(4) for _ in range(5)]
    assert [(d.epoch, d.start, d.end) for d in draws] == [
        (0, 0, 4),
        (0, 4, 8),
        (0, 8, 12),
        (1, 12, 16),
        (1, 16, 20),
    ]
    rows = [index for draw in draws for index in draw.indices]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))


def test_a_batch_larger_than_the_file_wraps_more_than_once() -> None:
    counts = Counter(Sampler(3, seed=1).draw(9).indices)
    assert counts == {0: 3, 1: 3, 2: 3}


def test_the_batch_size_does_not_change_the_order() -> None:
    ones, sevens = Sampler(20, seed=5), Sampler(20, seed=5)
    assert [ones.draw(1).indices[0] for _ in range(35)] == [
        index for _ in range(5) for index in sevens.draw(7).indices
    ]


def test_the_seed_decides_the_order() -> None:
    assert Sampler(50, seed=1).draw(50).indices != Sampler(50, seed=2).draw(50).indices


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        Sampler(0, seed=1)
    with pytest.raises(ValueError, match="negative"):
        Sampler(5, seed=1, position=-1)
