"""Megatron's process groups stand where `Layout` says, and can be left and joined again."""

from itertools import product
from pathlib import Path

import pytest

from megatron_backend.runtime import distributed
from service.spec import SftSpec
from service.spec.layout import Coordinates, Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training.training_runs import random_batch, train
from tests.ports import free_port


def place(_rank: int) -> Coordinates:
    """This rank's coordinates as Megatron sees them."""
    from megatron.core import parallel_state

    return Coordinates(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
    )


def wrong_groups(_rank: int) -> list[str]:
    """Layouts of up to 3 ranks in each dimension whose groups Megatron would make of others."""
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    wrong = []
    for tp, cp, dp, pp in product((1, 2, 3), repeat=4):
        plain = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        for ep in (size for size in range(1, dp * cp + 1) if dp * cp % size == 0):
            layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
            experts = RankGenerator(tp=tp, ep=ep, dp=dp * cp // ep, pp=pp, cp=1, order=order)
            same = [groups(layout, name) == plain.get_ranks(name) for name in ("tp", "cp", "pp")]
            same += [groups(layout, "dp") == plain.get_ranks("dp")]
            place_of = {
                rank: place for group in experts.get_ranks("ep") for place, rank in enumerate(group)
            }
            same += [layout.coordinates(rank).ep == place_of[rank] for rank in place_of]
            if not all(same):
                wrong.append(str(layout))
    return wrong


def groups(layout: Layout, dimension: str) -> list[list[int]]:
    """Ranks that differ in one dimension only, in the order of their first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        key = tuple(getattr(at, name) for name in ("tp", "cp", "dp", "pp") if name != dimension)
        found.setdefault(key, []).append(rank)
    return sorted(found.values())


def test_every_layout_is_numbered_as_megatron_numbers_it(ranks: Ranks) -> None:
    (wrong,) = ranks.run(Layout(), wrong_groups)
    assert wrong == []


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2, ep=2), Layout(cp=2)], ids=str
)
def test_ranks_stand_where_the_layout_says(ranks: Ranks, layout: Layout) -> None:
    places = ranks.run(layout, place)
    assert places == [layout.coordinates(rank) for rank in range(layout.world_size)]


@pytest.mark.slow
def test_four_ranks_stand_where_the_layout_says(ranks: Ranks) -> None:
    for layout in (
        Layout(tp=2, dp=2),
        Layout(pp=2, dp=2),
        Layout(tp=2, pp=2),
        Layout(cp=2, dp=2, ep=4),
        Layout(tp=2, cp=2, ep=2),
    ):
        assert ranks.run(layout, place) == [layout.coordinates(rank) for rank in range(4)]


def threads_left(rank: int, model: str, runs: int) -> list[int]:
    """Threads of gloo's after each of several training runs in this process."""
    distributed.shutdown()  # the harness has joined the ranks already
    counts = []
    for _ in range(runs):
        distributed.initialize(Layout(), rank, address="127.0.0.1", port=free_port(), seed=1)
        train(rank, model, Layout(), SftSpec(), [random_batch()], {})
        distributed.shutdown()
        names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
        counts.append(sum(name.startswith("gloo") for name in names))
    return counts


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_training_runs_leave_no_process_groups_behind(ranks: Ranks, model: str) -> None:
    """Megatron itself keeps a few of the last ones until it makes others; no run adds to them."""
    (counts,) = ranks.run(Layout(), threads_left, model, 3)
    assert counts[0] == counts[1] == counts[2]


def test_a_rank_that_is_not_in_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="not 3"):
        distributed.initialize(Layout(dp=2), 3, address="127.0.0.1", port=1, seed=1)
