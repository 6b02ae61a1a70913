"""Megatron's process groups stand where `Layout` says, and can be left and joined again."""

import pytest

from megatron_backend.runtime import distributed
from service.spec.layout import Coordinates, Layout
from tests.megatron_backend.ranks import Ranks


def place(_rank: int) -> Coordinates:
    """This rank's coordinates as Megatron sees them."""
    from megatron.core import parallel_state

    return Coordinates(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
    )


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2)], ids=str)
def test_ranks_stand_where_the_layout_says(ranks: Ranks, layout: Layout) -> None:
    places = ranks.run(layout, place)
    assert places == [layout.coordinates(rank) for rank in range(layout.world_size)]


@pytest.mark.slow
def test_four_ranks_stand_where_the_layout_says(ranks: Ranks) -> None:
    for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2)):
        assert ranks.run(layout, place) == [layout.coordinates(rank) for rank in range(4)]


def test_a_rank_that_is_not_in_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="not 3"):
        distributed.initialize(Layout(dp=2), 3, address="127.0.0.1", port=1, seed=1)
