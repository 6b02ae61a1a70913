"""Medians, tails and order of pairs."""

import pytest

from tests.bench.statistics import Ratio, order


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    ratio = Ratio.of(ours=[1.0, 2.0, 4.0], peer=[3.0, 4.0, 16.0])
    assert ratio.median == 3.0  # of 3, 2 and 4; medians would give 2
    assert (ratio.low, ratio.high) == pytest.approx((2.2, 3.8))
    assert (ratio.our_seconds, ratio.peer_seconds) == (2.0, 4.0)


def test_the_spread_is_the_peers_own() -> None:
    assert Ratio.of(ours=[1.0, 9.0, 5.0], peer=[10.0, 10.0, 10.0]).peer_spread == 0
    peer = [float(9 + i / 5) for i in range(11)]  # 9.0 to 11.0, tails 9.2 and 10.8
    assert Ratio.of(ours=[1.0] * 11, peer=peer).peer_spread == pytest.approx(0.16)


@pytest.mark.parametrize(("ours", "peer"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([0.0, 1.0],) * 2])
def test_what_is_no_list_of_pairs_is_refused(ours: list[float], peer: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|no time"):
        Ratio.of(ours, peer)


def test_pairs_run_a_b_b_a() -> None:
    runs = [side for pair in range(4) for side in order(pair)]
    assert runs == ["ours", "peer", "peer", "ours"] * 2
