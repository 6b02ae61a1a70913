"""Who sends which slice of which tensor to whom: a pure function of what all ranks hold.

A model is spread in four ways, and only one of them cuts a tensor. Pipeline and virtual stages give
whole layers to ranks, expert parallelism whole experts, data parallelism copies of everything. All
of that vanishes once a tensor has its name in the whole model. What is left is tensor parallelism:
a tensor is cut along one dimension into `parts`, and where two matrices lie in one (a gated MLP's
gate and other half, `blocks` = 2) each of them is cut by itself.

    blocks = 1:   |  part 0  |  part 1  |          part 0 holds [0, n/2)
    blocks = 2:   | p0 | p1 || p0 | p1  |          part 0 holds [0, n/4) and [n/2, 3n/4)

So a part is some runs of the whole dimension, and a transfer is where a run of the target meets a
run of a source. Where several ranks hold the same part, a target takes its own, or else one by its
rank, which spreads the work. Every rank computes the same plan from the same lists, and keeps what
concerns it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds of one tensor.

    Attributes:
        name: of the tensor in the whole model.
        shape: of what is here.
        dtype: as torch names it.
        dim: the dimension that tensor parallelism cuts; None where it cuts none.
        parts: how many ranks share the tensor.
        part: which of them this is.
        blocks: how many matrices lie one after another in `dim`, each cut by itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim: int | None = None
    parts: int = 1
    part: int = 0
    blocks: int = 1

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the tensor on one rank."""
        return tuple(
            size * self.parts if dim == self.dim else size for dim, size in enumerate(self.shape)
        )

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(start in the whole, start in this piece, length), along `dim`, or along dimension 0."""
        length = self.shape[self.dim or 0] // self.blocks if self.shape else 1
        for block in range(self.blocks):
            yield (block * self.parts + self.part) * length, block * length, length


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One slice from one rank to another, or to itself.

    Attributes:
        source, target: ranks.
        source_piece, target_piece: which of the lists that they gave.
        dim: along which the slice is cut; None for all of a tensor without dimensions.
        source_start, target_start, length: the slice in either piece.
    """

    source: int
    target: int
    source_piece: int
    target_piece: int
    dim: int | None
    source_start: int
    target_start: int
    length: int


def plan_transfers(
    sources: Sequence[Sequence[Piece]], targets: Sequence[Sequence[Piece]]
) -> Iterator[Transfer]:
    """All transfers that fill every target, in an order that is the same everywhere.

    Args:
        sources: what each rank holds of the model that is read; nothing on some ranks.
        targets: what each rank holds of the model that is written.

    Raises:
        ValueError: a target's tensor is nowhere among the sources, or is of another shape or dtype.
    """
    holders: dict[str, list[tuple[int, int, Piece]]] = {}
    for rank, pieces in enumerate(sources):
        for number, piece in enumerate(pieces):
            holders.setdefault(piece.name, []).append((rank, number, piece))
    for rank, pieces in enumerate(targets):
        for number, piece in enumerate(pieces):
            held = _one_of_each_part(holders.get(piece.name, []), rank)
            yield from _fill(rank, number, piece, held)


def _one_of_each_part(
    holders: Sequence[tuple[int, int, Piece]], target: int
) -> list[tuple[int, int, Piece]]:
    by_part: dict[int, list[tuple[int, int, Piece]]] = {}
    for holder in holders:
        by_part.setdefault(holder[2].part, []).append(holder)
    return [
        next((one for one in copies if one[0] == target), copies[target % len(copies)])
        for _, copies in sorted(by_part.items())
    ]


def _fill(
    rank: int, number: int, piece: Piece, held: Sequence[tuple[int, int, Piece]]
) -> Iterator[Transfer]:
    if not held:
        raise ValueError(f"no rank of the trained model holds {piece.name}, which the copy has")
    parts = held[0][2].parts
    if len(held) != parts:
        raise ValueError(
            f"{len(held)} of the {parts} parts of {piece.name} are in the trained model"
        )
    for source, source_number, source_piece in held:
        _check_alike(source_piece, piece)
        for there, in_source, source_length in source_piece.runs():
            for here, in_target, target_length in piece.runs():
                start = max(there, here)
                stop = min(there + source_length, here + target_length)
                if start < stop:
                    yield Transfer(
                        source=source,
                        target=rank,
                        source_piece=source_number,
                        target_piece=number,
                        dim=(piece.dim or 0) if piece.shape else None,
                        source_start=in_source + start - there,
                        target_start=in_target + start - here,
                        length=stop - start,
                    )


def _check_alike(source: Piece, target: Piece) -> None:
    kinds = [(list(one.whole_shape), one.dtype, one.dim, one.blocks) for one in (source, target)]
    if kinds[0] != kinds[1]:
        described = [
            f"{shape} {dtype} in {blocks} blocks cut along {dim}"
            for shape, dtype, dim, blocks in kinds
        ]
        raise ValueError(
            f"{target.name} is {described[0]} in the trained model, and {described[1]} in the copy"
        )
