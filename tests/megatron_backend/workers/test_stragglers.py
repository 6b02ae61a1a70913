import pytest

from megatron_backend.workers.stragglers import IN_A_ROW, Stragglers

EVEN, SLOW = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 2.5, 1.0]


def test_one_slow_rank_is_told_once_it_stays_slow() -> None:
    watch = Stragglers()
    told = [watch.see(SLOW) for _ in range(IN_A_ROW**2)]
    assert [step for step, messages in enumerate(told, 1) if messages] == [IN_A_ROW, IN_A_ROW**2]
    (message,) = told[IN_A_ROW - 1]
    assert "rank 2 is slower than the others for 8 steps" in message
    assert "2.50 s, the median rank for 1.00 s" in message


def test_a_good_step_begins_the_count_anew() -> None:
    watch = Stragglers()
    for _ in range(IN_A_ROW):
        steps = [*[SLOW] * (IN_A_ROW - 1), EVEN]
        assert not any(watch.see(step) for step in steps)


@pytest.mark.parametrize(
    "own",
    [
        [1.0],
        [0.01, 0.09],  # nine times as long, but nothing that anybody would notice
        [2.0, 2.0, 1.0],  # one is faster
        [5.0, 1.0, 5.0, 5.0],
    ],
)
def test_no_straggler(own: list[float]) -> None:
    watch = Stragglers()
    assert not any(watch.see(own) for _ in range(2 * IN_A_ROW))


def test_of_two_ranks_the_slower_one() -> None:
    watch = Stragglers()
    told = [message for _ in range(IN_A_ROW) for message in watch.see([3.0, 1.0])]
    assert len(told) == 1
    assert told[0].startswith("rank 0 ")
