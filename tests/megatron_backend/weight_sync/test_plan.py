"""Any cut of any tensors becomes any other; tensors of numbers stand for a model."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_backend.weight_sync.flat_buffers import flat_buffers
from megatron_backend.weight_sync.plan import Piece, plan_transfers

Held = list[list[tuple[Piece, NDArray[np.int64]]]]


def cut(
    tensors: dict[str, NDArray[np.int64]],
    cuts: dict[str, tuple[int | None, int]],
    *,
    tp: int,
    copies: int,
    owners: dict[str, int],
) -> Held:
    """What tp x copies x stages ranks hold; a tensor is on the stage that owns it."""
    held: Held = []
    for stage in range(max(owners.values()) + 1):
        for rank in range(tp * copies):
            mine = []
            for name, tensor in tensors.items():
                if owners[name] != stage:
                    continue
                dim, blocks = cuts[name]
                parts = tp if dim is not None else 1
                part = tensor
                if dim is not None:
                    matrices = np.split(tensor, blocks, axis=dim)
                    part = np.concatenate(
                        [np.split(matrix, tp, axis=dim)[rank % tp] for matrix in matrices], axis=dim
                    )
                piece = Piece(
                    name=name,
                    shape=part.shape,
                    dtype="torch.int64",
                    dim=dim,
                    parts=parts,
                    part=rank % parts,
                    blocks=blocks,
                )
                mine.append((piece, part))
            held.append(mine)
    return held


@st.composite
def spread_tensors(draw: st.DrawFn) -> tuple[Held, Held]:
    """A model as a random layout holds it, and as another does."""
    tensors, cuts = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(12 * draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 3))))
        size = int(np.prod(shape))
        tensors[f"t{number}"] = np.arange(size).reshape(shape) + 10_000 * number
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        cuts[f"t{number}"] = (dim, 1 if dim is None else draw(st.sampled_from([1, 2])))
    sides = [
        cut(
            tensors,
            cuts,
            tp=draw(st.sampled_from([1, 2, 3, 6])),
            copies=draw(st.integers(1, 2)),
            owners={name: draw(st.integers(0, stages - 1)) for name in tensors},
        )
        for stages in (draw(st.integers(1, 3)), 1)
    ]
    return sides[0], sides[1]


@settings(max_examples=60, deadline=None)
@given(spread_tensors())
def test_every_element_arrives_exactly_once(spread: tuple[Held, Held]) -> None:
    sources, targets = spread
    arrived = [[np.zeros_like(part) for _, part in held] for held in targets]
    written = [[np.zeros_like(part) for _, part in held] for held in targets]
    size = max(len(sources), len(targets))
    pieces = [
        [[piece for piece, _ in held] for held in side] + [[]] * (size - len(side))
        for side in (sources, targets)
    ]
    for one in plan_transfers(*pieces):
        source = sources[one.source][one.source_piece][1]
        assert one.dim is not None
        there = [slice(None)] * source.ndim
        here = list(there)
        there[one.dim] = slice(one.source_start, one.source_start + one.length)
        here[one.dim] = slice(one.target_start, one.target_start + one.length)
        arrived[one.target][one.target_piece][tuple(here)] = source[tuple(there)]
        written[one.target][one.target_piece][tuple(here)] += 1
        # A rank that has the part itself asks nobody else for it.
        name, part = pieces[0][one.source][one.source_piece].name, one.source_piece
        own = {(p.name, p.part) for p in pieces[0][one.target]}
        asked = pieces[0][one.source][part]
        assert one.source == one.target or (name, asked.part) not in own
    for rank, held in enumerate(targets):
        for number, (_, part) in enumerate(held):
            assert (written[rank][number] == 1).all()
            assert (arrived[rank][number] == part).all()


def whole(name: str, *shape: int, dtype: str = "torch.float32") -> Piece:
    return Piece(name=name, shape=shape, dtype=dtype)


def test_two_different_models_are_refused_by_the_tensors_name() -> None:
    with pytest.raises(ValueError, match="no rank of the trained model holds b"):
        list(plan_transfers([[whole("a", 4)]], [[whole("b", 4)]]))
    with pytest.raises(ValueError, match=r"a is \[4\] torch\.float32 .* and \[5\] "):
        list(plan_transfers([[whole("a", 4)]], [[whole("a", 5)]]))
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        list(plan_transfers([[whole("a", 4)]], [[whole("a", 4, dtype="torch.bfloat16")]]))
    half = Piece(name="a", shape=(2,), dtype="torch.float32", dim=0, parts=2, part=1)
    with pytest.raises(ValueError, match="1 of the 2 parts of a are in the trained model"):
        list(plan_transfers([[half]], [[whole("a", 4)]]))


def test_flat_buffers_are_bounded_aligned_and_hold_every_slice_once() -> None:
    targets = [whole("a", 7, 3), whole("b"), whole("c", 5, dtype="torch.bfloat16")]
    transfers = list(plan_transfers([targets], [targets]))
    buffers = flat_buffers(transfers, targets, limit=64)
    segments = [segment for buffer in buffers for segment in buffer]
    assert all(buffer[-1].stop <= 64 for buffer in buffers)
    assert all(segment.offset % 16 == 0 for segment in segments)
    assert len(buffers) > 1
    for buffer in buffers:
        for one, following in itertools.pairwise(buffer):
            assert one.stop <= following.offset
    rows = sorted(
        row
        for segment in segments
        if segment.transfer.target_piece == 0
        for row in range(
            segment.transfer.target_start, segment.transfer.target_start + segment.transfer.length
        )
    )
    assert rows == list(range(7))
    assert [segment.shape for segment in segments if segment.transfer.target_piece == 1] == [()]
