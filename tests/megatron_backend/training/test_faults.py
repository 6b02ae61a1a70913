"""Steps that are not taken, and tied copies that stay the same."""

import pytest

from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.training import fault_ranks

STEPS = 10


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, vpp=2)], ids=["pp2", "pp2vpp2"])
def test_e08_tied_copies_stay_the_same_and_are_told_apart(ranks: Ranks, layout: Layout) -> None:
    results = ranks.run(layout, fault_ranks.tied_steps, layout, STEPS)
    assert [difference for _, difference in results] == pytest.approx([0.25, 0.25])
    for differences, _ in results:
        assert differences == [0.0] * STEPS


def test_a_single_stage_holds_one_copy(ranks: Ranks) -> None:
    ((differences, changed),) = ranks.run(Layout(), fault_ranks.tied_steps, Layout(), 1)
    assert (differences, changed) == ([None], None)


def test_a_step_above_a_limit_of_its_norm_or_loss_changes_nothing(ranks: Ranks) -> None:
    """The same step again gives the same numbers, to the bit, and is taken at the limits."""
    (shares,) = ranks.run(Layout(), fault_ranks.refused_steps, Layout())
    assert [moved for moved, *_ in shares] == [False, False, False, True]
    ((norm, loss, finite),) = {tuple(numbers) for _, *numbers in shares}
    assert norm > 0.01
    assert loss > 0
    assert finite
