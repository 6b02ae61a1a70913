"""The plan of a step's micro-batches: each row once, equally many on every rank, like in size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_backend.training.micro_batch import Limits, Plan, micro_batches, plan_micro_batches
from megatron_backend.training.sequence import Cut
from service.spec.layout import Layout
from tests.megatron_backend.training.training_runs import random_batch


def sizes_of(plan: Plan) -> list[list[int]]:
    """How many rows each micro-batch has."""
    return [[len(rows) for rows in rank] for rank in plan]


def rows_of(plan: Plan) -> list[int]:
    """All rows, sorted."""
    return sorted(row for rank in plan for rows in rank for row in rows)


@settings(deadline=None, max_examples=300)
@given(
    units=st.lists(st.integers(1, 200), max_size=40),
    unit=st.integers(1, 4),
    ranks=st.integers(1, 4),
    tokens=st.integers(1, 600),
    rows=st.none() | st.integers(1, 5),
    least=st.integers(1, 4),
    multiple=st.integers(1, 3),
    packing=st.booleans(),
    factor=st.sampled_from([1, 4, 12]),
)
def test_each_row_once_and_equally_many_micro_batches_on_every_rank(
    units: list[int],
    unit: int,
    ranks: int,
    tokens: int,
    rows: int | None,
    least: int,
    multiple: int,
    packing: bool,
    factor: int,
) -> None:
    """And no unit is taken apart: its rows are in one micro-batch, one behind the other."""
    # The rows of a unit have lengths of their own.
    lengths = [1 + length * (7 + row) // 10 for length in units for row in range(unit)]
    limits = Limits(tokens=tokens, rows=rows, least=least, multiple=multiple)
    plan = plan_micro_batches(
        lengths, ranks=ranks, limits=limits, packing=packing, factor=factor, unit=unit
    )
    assert rows_of(plan) == list(range(len(lengths)))
    counts = {len(rank) for rank in plan}
    assert len(plan) == ranks
    assert len(counts) == 1
    assert min(counts) >= 1
    assert min(counts) % multiple == 0
    slots = [-(-length // factor) * factor for length in lengths]
    for group in (group for rank in plan for group in rank):
        firsts = group[::unit]
        assert all(first % unit == 0 for first in firsts)
        assert group == [first + row for first in firsts for row in range(unit)]
        if len(firsts) <= 1:
            continue
        if rows is not None:
            assert len(group) <= rows
        elif packing:
            assert sum(slots[row] for row in group) <= tokens
        else:
            assert max(slots[row] for row in group) * len(group) <= tokens
    if packing and rows is None and len(units) >= ranks * least:
        assert min(counts) >= least


def test_rows_that_are_no_whole_number_of_units_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows are no whole number of units of 2"):
        plan_micro_batches([3] * 5, ranks=1, limits=Limits(), unit=2)


def test_micro_batches_of_fewer_rows_than_a_unit_have_one_unit() -> None:
    plan = plan_micro_batches([3] * 8, ranks=2, limits=Limits(rows=1), unit=2)
    assert sizes_of(plan) == [[2, 2], [2, 2]]
    plan = plan_micro_batches([3] * 8, ranks=1, limits=Limits(rows=5), unit=2)
    assert sizes_of(plan) == [[4, 4]]


def test_units_of_padded_rows_count_as_their_longest() -> None:
    """A unit of 90 and 10 tokens is 180 slots, as one of 90 and 90."""
    lengths = [90, 10, 90, 90, 10, 90]
    limits = Limits(tokens=360)
    plan = plan_micro_batches(lengths, ranks=1, limits=limits, packing=False, unit=2)
    assert plan == [[[0, 1, 2, 3], [4, 5]]]
    assert sizes_of(plan_micro_batches(lengths, ranks=1, limits=limits, unit=2)) == [[4, 2]]


def test_a_pipeline_does_not_take_units_apart() -> None:
    """4 units are the 4 micro-batches that overlap 2 stages; 8 rows would have been enough."""
    limits = Limits.of(Layout(pp=2), tokens=16384, rows=None)
    for packing in (True, False):
        plan = plan_micro_batches([9] * 8, ranks=1, limits=limits, packing=packing, unit=2)
        assert plan == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    virtual = Limits.of(Layout(pp=2, vpp=2), tokens=16384, rows=4)
    plan = plan_micro_batches([9] * 12, ranks=1, limits=virtual, unit=2)
    assert sizes_of(plan) == [[4, 4, 4, 0]]


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), ranks=st.integers(1, 4))
def test_ranks_get_like_numbers_of_tokens(lengths: list[int], ranks: int) -> None:
    for tokens in (128, 10_000):
        plan = plan_micro_batches(lengths, ranks=ranks, limits=Limits(tokens=tokens))
        loads = [sum(lengths[row] for rows in rank for row in rows) for rank in plan]
        assert max(loads) - min(loads) <= 2 * max(lengths)


def test_thousands_of_long_rows_are_planned_at_once() -> None:
    for packing in (True, False):
        limits = Limits(tokens=4096)
        plan = plan_micro_batches([4096] * 4096, ranks=2, limits=limits, packing=packing)
        assert sizes_of(plan) == [[1] * 2048] * 2
    lengths = [2049 + index % 7 for index in range(4096)]
    plan = plan_micro_batches(lengths, ranks=2, limits=Limits(tokens=4096))
    assert rows_of(plan) == list(range(4096))


def test_more_micro_batches_than_needed_are_few() -> None:
    """Packing is a hard problem; what is paid for doing it quickly stays below a tenth."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 512, (400,), generator=generator).tolist()
    plan = plan_micro_batches(lengths, ranks=1, limits=Limits(tokens=2048))
    assert len(plan[0]) <= 1.1 * sum(lengths) / 2048 + 1


def test_much_shorter_padded_rows_go_apart() -> None:
    lengths = [10] * 30 + [80] * 10
    plan = plan_micro_batches(lengths, ranks=1, limits=Limits(), packing=False)
    assert sizes_of(plan) == [[10, 30]]
    assert sizes_of(plan_micro_batches(lengths, ranks=1, limits=Limits())) == [[40]]


def test_a_pipeline_gets_what_overlaps_its_stages() -> None:
    limits = Limits.of(Layout(pp=2), tokens=16384, rows=None)
    for packing in (True, False):
        plan = plan_micro_batches([9] * 16, ranks=1, limits=limits, packing=packing)
        assert sizes_of(plan) == [[4, 4, 4, 4]]
    virtual = Limits.of(Layout(pp=2, vpp=2), tokens=16384, rows=3)
    assert sizes_of(plan_micro_batches([9] * 7, ranks=1, limits=virtual)) == [[3, 3, 1, 0]]


@pytest.mark.parametrize("packing", [True, False])
def test_micro_batches_hold_their_rows(packing: bool) -> None:
    batch = random_batch(rows=7)
    plan = plan_micro_batches(
        batch.lengths.tolist(), ranks=2, limits=Limits(rows=2), packing=packing
    )
    cut, cpu = Cut(packing=packing), torch.device("cpu")
    parts = [part for share in plan for part in micro_batches(batch, share, cut, device=cpu)]
    assert sorted(row for part in parts for row in part.rows) == [*range(7)]
    for part in parts:
        assert len(part.batch) == len(part.rows)
        longest = int(part.batch.lengths.max()) if part.rows else 1
        assert part.batch.tokens.shape[1] == longest
        for index, row in enumerate(part.rows):
            length = int(batch.lengths[row])
            assert torch.equal(part.batch.tokens[index, :length], batch.tokens[row, :length])
            assert torch.equal(part.batch.loss_mask[index], batch.loss_mask[row, :longest])
            for name in ("old_log_probs", "reference_log_probs", "advantages"):
                kept = part.batch.per_token[name][index]
                assert torch.equal(kept, batch.per_token[name][row, :longest])
        assert int((part.stream.source >= 0).sum()) == int(part.batch.lengths.sum())
