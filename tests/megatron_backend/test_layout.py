"""Rank numbers, shares of a batch, layers of a stage."""

import pytest

from megatron_backend.layout import Coordinates, Layout


def test_ranks_are_numbered_tensor_first_then_data_then_pipeline() -> None:
    layout = Layout(tp=2, pp=2, dp=3)
    assert layout.world_size == 12
    assert layout.coordinates(1) == Coordinates(tp=1, pp=0, dp=0)
    assert layout.coordinates(2) == Coordinates(tp=0, pp=0, dp=1)
    assert layout.coordinates(6) == Coordinates(tp=0, pp=1, dp=0)
    for rank in range(12):
        place = layout.coordinates(rank)
        assert layout.rank(tp=place.tp, pp=place.pp, dp=place.dp) == rank
    assert layout.output_ranks == [6, 8, 10]


def test_a_rank_outside_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
        Layout(tp=2).coordinates(2)
    with pytest.raises(ValueError, match="pp is 0"):
        Layout(pp=0)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 64])
def test_every_row_is_in_one_share(count: int) -> None:
    layout = Layout(dp=3)
    shares = [layout.share(count, dp) for dp in range(3)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_uneven_layers_are_all_on_a_stage_once_e01() -> None:
    stages = Layout(pp=4).stage_layers(30)
    assert [len(stage) for stage in stages] == [8, 8, 7, 7]
    assert [layer for stage in stages for layer in stage] == list(range(30))
    with pytest.raises(ValueError, match="2 layers cannot fill pp = 3"):
        Layout(pp=3).stage_layers(2)
