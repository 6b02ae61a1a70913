"""Steps that are not taken, and tied copies that stay the same."""

import pytest
import torch

from service.spec import Fp8Spec
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


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2)], ids=str)
@pytest.mark.parametrize(
    "fp8", [None, Fp8Spec(recipe="delayed", amax_history=4)], ids=["fp16", "fp16 and fp8"]
)
def test_a_step_that_is_refused_leaves_nothing_in_memory(
    ranks: Ranks, layout: Layout, fp8: Fp8Spec | None
) -> None:
    """Neither a maximum nor a loss scale; the next step is that of a job which never tried it."""
    for at_first, above, broken, *last in ranks.run(
        layout, fault_ranks.memory_of_refused_steps, layout, fp8
    ):
        assert len(at_first) > (1 if fp8 else 0)
        for later in (above, broken):
            torch.testing.assert_close(later, at_first, rtol=0, atol=0)
        torch.testing.assert_close(last[0], last[1], rtol=0, atol=0)


def test_a_gradient_that_overflowed_leaves_nothing_in_fp8_s_memory(ranks: Ranks) -> None:
    """It is computed again at a smaller scale, and only that one counts."""
    ((lowered, calm),) = ranks.run(Layout(), fault_ranks.overflowing_step)
    assert lowered[2] < 2.0**40
    torch.testing.assert_close(lowered, calm, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "name"),
    [(Layout(dp=2), "qwen2-tied"), (Layout(dp=4, ep=2), "mixtral"), (Layout(dp=2, pp=2), "llama")],
    ids=["dp2", "dp4ep2", "dp2pp2"],
)
def test_half_of_the_copies_compute_a_step_alone(ranks: Ranks, layout: Layout, name: str) -> None:
    """A half without the broken rank computes what all did before; the others give no number."""
    answers = ranks.run(layout, fault_ranks.steps_alone, layout, name)
    for well, broken in answers:
        assert all(share.finite for share in well)
        for share in [*well[1:], broken[1]]:
            assert share.loss == pytest.approx(well[0].loss, rel=1e-5)
            assert share.gradient_norm == pytest.approx(well[0].gradient_norm, rel=1e-4)
        assert [share.finite for share in broken] == [False, True, False]
    spoken = [answers[rank][0] for rank in layout.output_ranks]
    for place in range(3):  # every row is in one rank's metrics
        counts = [shares[place].sums.get("entropy", (0.0, 0.0))[1] for shares in spoken]
        assert sum(counts) == sum(s[0].sums["entropy"][1] for s in spoken)
    assert all(not shares[1].sums for shares in spoken[layout.dp // 2 :])
