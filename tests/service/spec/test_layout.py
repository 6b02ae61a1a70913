"""Rank numbers, shares of a batch, layers of a stage."""

import pytest

from service.spec import ParallelSpec
from service.spec.layout import Coordinates, Layout


def test_ranks_are_numbered_tensor_first_then_context_then_data_then_pipeline() -> None:
    layout = Layout(tp=2, cp=2, dp=3, pp=2)
    assert layout.world_size == 24
    assert layout.coordinates(1) == Coordinates(tp=1)
    assert layout.coordinates(2) == Coordinates(cp=1)
    assert layout.coordinates(4) == Coordinates(dp=1)
    assert layout.coordinates(12) == Coordinates(pp=1)
    for rank in range(24):
        place = layout.coordinates(rank)
        assert layout.rank(tp=place.tp, cp=place.cp, dp=place.dp, pp=place.pp) == rank
    assert layout.output_ranks == [12, 16, 20]


def test_experts_are_spread_over_context_and_data_ranks_together() -> None:
    layout = Layout(tp=2, cp=2, dp=2, ep=4)
    assert [layout.coordinates(rank).ep for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    layout = Layout(dp=4, ep=2, pp=2)
    assert [layout.coordinates(rank).ep for rank in range(8)] == [0, 1, 0, 1] * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 0}, "pp is 0, but must be at least 1"),
        ({"vpp": 2}, "vpp = 2 needs pp above 1"),
        ({"ep": 2, "dp": 3}, "ep = 2 does not divide dp x cp = 3 x 1"),
        ({"sequence_parallel": True}, "sequence_parallel needs tp above 1"),
        ({"pp": 2, "pipeline_layers": (4,)}, r"pipeline_layers is \[4\], but must give each"),
        ({"pp": 2, "pipeline_layers": (4, 0)}, "at least 1 layer"),
        ({"pp": 2, "vpp": 2, "pipeline_layers": (4, 4)}, "pipeline_layers cannot go with vpp"),
    ],
)
def test_an_impossible_layout_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**sizes)  # type: ignore[arg-type]


def test_a_rank_outside_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
        Layout(tp=2).coordinates(2)


def test_a_layout_comes_from_a_jobs_parallel_and_survives_json() -> None:
    spec = ParallelSpec(tp=2, pp=2, pipeline_layers=[3, 4], cp=2, ep=2, sequence_parallel=True)
    layout = Layout.from_spec(spec, dp=2)
    assert layout == Layout(
        tp=2, pp=2, cp=2, ep=2, dp=2, sequence_parallel=True, pipeline_layers=(3, 4)
    )
    assert str(layout) == "tp2 pp2 dp2 cp2 ep2 sp layers3-4"
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(Layout(tp=2).to_json()) == Layout(tp=2)


def test_dimensions_that_an_old_record_does_not_name_have_their_defaults() -> None:
    assert Layout.from_json({"tp": 2, "pp": 1, "dp": 1}) == Layout(tp=2)
    with pytest.raises(TypeError, match="depth"):
        Layout.from_json({"depth": 2})


@pytest.mark.parametrize("count", [0, 1, 5, 6, 64])
def test_every_row_is_in_one_share(count: int) -> None:
    layout = Layout(dp=3)
    shares = [layout.share(count, dp) for dp in range(3)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_uneven_layers_are_all_on_a_stage_once_e01() -> None:
    stages = Layout(pp=4).stage_layers(30)
    assert [len(chunk) for stage in stages for chunk in stage] == [8, 8, 7, 7]
    assert [layer for [chunk] in stages for layer in chunk] == list(range(30))
    with pytest.raises(ValueError, match="pp = 3 stages cannot be filled by 2 layers"):
        Layout(pp=3).stage_layers(2)


def test_explicit_stages_have_the_layers_that_they_ask_for() -> None:
    layout = Layout(pp=3, pipeline_layers=(1, 4, 2))
    assert layout.stage_layers(7) == [[range(1)], [range(1, 5)], [range(5, 7)]]
    with pytest.raises(ValueError, match=r"\[1, 4, 2\] are 7 layers, but the model has 8"):
        layout.stage_layers(8)


def test_virtual_stages_are_dealt_to_the_stages_in_turn() -> None:
    layout = Layout(pp=2, vpp=2)
    assert layout.stage_layers(8) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    with pytest.raises(ValueError, match="vpp = 2 chunks on each of pp = 2 stages do not divide 6"):
        layout.stage_layers(6)
