"""Where tokens stand: every token once, in the order in which Megatron turns and cuts sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.batch import Batch
from megatron_backend.training.sequence import Cut, Stream, lay_out, local_slots
from service.spec import Fp8Spec
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks

LENGTHS = st.lists(st.integers(1, 33), max_size=6)
LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(cp=3),
    Layout(cp=2, tp=3, sequence_parallel=True),
]


def some_batch(lengths: list[int]) -> Batch:
    """Token i of row r is 100 r + i; what is behind a row is -1."""
    width = max(lengths, default=1)
    index = torch.arange(width)
    tokens = 100 * torch.arange(len(lengths)).unsqueeze(1) + index
    sizes = torch.tensor(lengths, dtype=torch.int64)
    real = index < sizes.unsqueeze(1)
    return Batch(tokens=tokens.where(real, -1), lengths=sizes, loss_mask=real.float())


def streams(batch: Batch, layout: Layout, *, packing: bool, fp8: Fp8Spec | None) -> list[Stream]:
    """Of each context-parallel rank."""
    return [
        lay_out(batch, Cut.of(layout, packing=packing, cp_rank=rank, fp8=fp8))
        for rank in range(layout.cp)
    ]


@settings(deadline=None, max_examples=60)
@given(
    lengths=LENGTHS,
    layout=st.sampled_from(LAYOUTS),
    packing=st.booleans(),
    recipe=st.sampled_from([None, "tensorwise", "mxfp8", "blockwise"]),
)
def test_every_token_has_one_slot_and_every_rank_equally_many_e09_e11(
    lengths: list[int], layout: Layout, packing: bool, recipe: str | None
) -> None:
    batch = some_batch(lengths)
    fp8 = None if recipe is None else Fp8Spec.model_validate({"recipe": recipe})
    parts = streams(batch, layout, packing=packing, fp8=fp8)
    sources = torch.cat([part.source for part in parts])
    real = sources[sources >= 0]
    expected = (batch.loss_mask.flatten() > 0).nonzero().squeeze(1)
    assert torch.equal(real.sort().values, expected)
    assert len({part.tokens.shape for part in parts}) == 1
    aligned = {None: 1, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}[recipe]
    for part in parts:
        # Hidden states are [T, R, H], tokens [R, T].
        slots = part.tokens.t().flatten()
        held = part.source >= 0
        assert torch.equal(slots[held], batch.tokens.flatten()[part.source[held]])
        assert torch.equal(part.filler, ~held.view(part.tokens.shape[::-1]).t())
        if part.positions is not None:
            check_filler(part, part.positions)
        local = part.tokens.shape[1]
        shards = layout.tp if layout.sequence_parallel else 1
        assert local % shards == 0
        assert local // shards % aligned == 0


def check_filler(part: Stream, positions: Tensor) -> None:
    """What is not blank is a row's token at the place of that token; what is real is not blank."""
    blank = part.blank if part.blank is not None else torch.zeros_like(part.source, dtype=bool)
    assert not (blank & (part.source >= 0)).any()
    assert torch.equal(part.tokens[0][~blank] % 100, positions[~blank])


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS.filter(bool), layout=st.sampled_from(LAYOUTS), packing=st.booleans())
def test_whole_rows_are_padded_as_little_as_can_be(
    lengths: list[int], layout: Layout, packing: bool
) -> None:
    (part, *_) = streams(some_batch(lengths), layout, packing=packing, fp8=None)
    cut = Cut.of(layout, packing=packing)
    if packing:
        rows = sum(-(-length // cut.row_factor) * cut.row_factor for length in lengths)
        assert part.tokens.numel() * layout.cp < rows + cut.factor
    else:
        assert part.tokens.shape[1] * layout.cp < max(lengths) + cut.factor


def test_positions_and_filler_of_a_packed_stream() -> None:
    """3 and 5 tokens on 2 context-parallel ranks, FP8 with 16 tokens to each rank."""
    batch = some_batch([3, 5])
    layout, fp8 = Layout(cp=2), Fp8Spec(recipe="tensorwise")
    first, second = streams(batch, layout, packing=True, fp8=fp8)
    assert first.sequences == (4, 8, 8, 8, 4)
    repeated = [100, 101, 102, 103, 104, 104, 104, 104]
    assert first.tokens[0, :6].tolist() == [0, 2, 100, 101, 104, 104]
    assert first.source[:6].tolist() == [0, -1, 5, 6, -1, -1]
    assert second.tokens[0, :6].tolist() == [1, 2, 102, 103, 104, 104]
    assert second.source[:6].tolist() == [1, 2, 7, 8, 9, -1]
    assert first.tokens[0, 6:10].tolist() == repeated[:2] + repeated[6:]
    assert not (first.source[6:] >= 0).any()
    assert first.blank is not None
    assert first.blank.nonzero().flatten().tolist() == [1, 4, 5, 8, 9, 12, 13]
    assert first.positions is not None
    assert first.positions.tolist() == [0, 3, *[0, 1, 6, 7] * 3, 0, 3]


def test_filler_repeats_the_beginning_of_a_row_e11() -> None:
    """So its activations are copies of real ones, and move no maximum over a tensor."""
    part = lay_out(some_batch([3, 7]), Cut(factor=16))
    assert part.sequences == (3, 7, 6)
    assert part.tokens[0].tolist() == [0, 1, 2, *range(100, 107), *range(100, 106)]


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_without_rows_is_filler(packing: bool) -> None:
    part = lay_out(some_batch([]), Cut(packing=packing, factor=4))
    assert part.tokens.tolist() == [[0, 0, 0, 0]]
    assert part.filler.all()
    assert part.blank is None or part.blank.all()
    assert (part.blank is not None) == packing


def megatrons_slots(_rank: int, lengths: list[int], cp: int) -> list[tuple[Tensor, Tensor]]:
    """For each rank: places by Megatron's rotary embeddings, and by its batch slicing."""
    from types import SimpleNamespace

    from megatron.core.models.common.embeddings.rope_utils import (
        _get_thd_freqs_on_this_cp_rank,
        get_pos_emb_on_this_cp_rank,
    )

    results = []
    for rank in range(cp):
        packed = [
            _get_thd_freqs_on_this_cp_rank(
                rank, cp, torch.empty(length // cp), torch.arange(length)
            )
            for length in lengths
        ]
        group = SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
        padded = get_pos_emb_on_this_cp_rank(torch.arange(lengths[0]), 0, group)
        results.append((torch.cat(packed), padded))
    return results


@pytest.mark.parametrize("cp", [2, 3])
def test_ranks_get_the_slots_that_megatron_expects(ranks: Ranks, cp: int) -> None:
    lengths = [2 * cp * size for size in (3, 1, 2)]
    (expected,) = ranks.run(Layout(), megatrons_slots, lengths, cp)
    for rank, (packed, padded) in enumerate(expected):
        part = lay_out(some_batch(lengths), Cut(cp=cp, cp_rank=rank))
        assert part.positions is not None
        assert torch.equal(part.positions, packed)
        assert torch.equal(local_slots(torch.arange(lengths[0]), Cut(cp=cp, cp_rank=rank)), padded)
