"""Where each token of a micro-batch stands on this rank: the one map that everything else reads.

A model sees a grid of slots: [R, T] where rows are padded, [1, N] where they lie end to end
(packed). Two things move tokens about in it, and this module is the only one that knows how:

- *Padding.* A layout carries only lengths that are multiples of some number (`padding_factor`).
  Padded rows are all filled up to one such length. Packed rows are filled up one by one only where
  context parallelism cuts each of them; the rest is added once, behind the last.
- *Context parallelism.* A sequence is cut into 2 x CP chunks, and rank r has the chunks r and
  2 x CP - 1 - r, one after the other: so causal attention costs every rank the same. This is the
  order that Megatron's rotary embeddings and Transformer Engine's attention expect.

Sequence parallelism cuts the slots once more; hidden states are gathered from it before any slot is
looked up, so it does not appear here.

No maximum that an FP8 recipe takes over a tensor is moved by filler of a packed stream, and nothing
is predicted from it. Behind the last row it repeats the beginning of a real row, as a sequence of
its own: attention is causal, so its activations are copies of that row's. Inside a row, and where
there is no row, nothing can be copied; such slots are `blank`, and models with FP8 keep them at 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.batch import Batch
from service.spec.layout import Layout
from service.spec.padding import padding_factor
from service.spec.parts import Fp8Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How sequences are laid out and cut on this rank.

    Attributes:
        packing: rows end to end, instead of padded to the longest.
        factor: lengths of padded rows, and of the whole packed stream, are multiples of it.
        cp: ranks that share each sequence.
        cp_rank: this one among them.
    """

    packing: bool = True
    factor: int = 1
    cp: int = 1
    cp_rank: int = 0

    @classmethod
    def of(
        cls, layout: Layout, *, packing: bool, cp_rank: int = 0, fp8: Fp8Spec | None = None
    ) -> "Cut":
        """What `layout` asks for."""
        factor = padding_factor(layout, fp8=fp8)
        return cls(packing=packing, factor=factor, cp=layout.cp, cp_rank=cp_rank)

    @property
    def row_factor(self) -> int:
        """What the slots of one row are a multiple of."""
        if not self.packing:
            return self.factor
        return 2 * self.cp if self.cp > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A micro-batch as this rank's model gets it.

    Attributes:
        tokens: [R, T] int64, this rank's slots; [1, N] where packed.
        source: [T * R] int64 in the order of hidden states [T, R, H]: which token of the batch
            stands in a slot, as row * (the batch's T) + index; -1 in filler.
        sequences: slots of each sequence of a packed stream, filler included, over all
            context-parallel ranks; None where rows are padded.
        positions: [N] int64, the place of each of this rank's slots in its own sequence; None
            where rows are padded.
        blank: [N] bool, filler that is no copy of a real token at its place; None where there is
            none, or rows are padded.
    """

    tokens: Tensor
    source: Tensor
    sequences: tuple[int, ...] | None = None
    positions: Tensor | None = None
    blank: Tensor | None = None

    @property
    def filler(self) -> Tensor:
        """[R, T] bool: slots that belong to no token."""
        rows, length = self.tokens.shape
        return (self.source < 0).view(length, rows).t()


def lay_out(batch: Batch, cut: Cut) -> Stream:
    """The slots of `batch` on this rank. A batch without rows becomes filler alone.

    Args:
        batch: rows of a micro-batch, on the model's device.
        cut: see `Cut`.
    """
    lengths: list[int] = batch.lengths.tolist()
    width = batch.tokens.shape[1]
    if cut.packing:
        pieces = list(_packed_pieces(lengths, cut))
    else:
        pieces = list(_padded_pieces(lengths, cut))
    index = torch.cat([local_slots(piece.places(width), cut) for piece in pieces])
    source = torch.cat([local_slots(piece.places(width, filler=-1), cut) for piece in pieces])
    index, source = index.to(batch.tokens.device), source.to(batch.tokens.device)
    # A batch without rows has no token to repeat.
    tokens = batch.tokens.flatten()[index] if len(batch) else torch.zeros_like(index)
    if not cut.packing:
        grid = tokens.view(len(pieces), -1)
        source = source.view(len(pieces), -1).t().flatten()
        return Stream(tokens=grid, source=source)
    positions = torch.cat([local_slots(torch.arange(piece.slots), cut) for piece in pieces])
    blank = None
    if any(piece.length < piece.slots for piece in pieces):
        blank = torch.cat([local_slots(piece.blank(), cut) for piece in pieces]).to(source.device)
    return Stream(
        tokens=tokens.unsqueeze(0),
        source=source,
        sequences=tuple(piece.slots for piece in pieces),
        positions=positions.to(source.device),
        blank=blank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """`slots` slots in a row; the first `length` hold the beginning of `row`, if they count."""

    row: int
    length: int
    slots: int
    counts: bool = True

    def places(self, width: int, *, filler: int | None = None) -> Tensor:
        """[slots]: index into the flattened batch; past the row its last token, or `filler`."""
        index = torch.arange(self.slots)
        places = self.row * width + index.clamp(max=self.length - 1)
        if filler is None:
            return places
        return torch.where((index < self.length) & self.counts, places, filler)

    def blank(self) -> Tensor:
        """[slots] bool: which of them are no token of `row`, at no matter which place."""
        return torch.arange(self.slots) >= self.length


def _padded_pieces(lengths: Sequence[int], cut: Cut) -> Iterator[_Piece]:
    longest = _up(max(lengths, default=1), cut.factor)
    for row, length in enumerate(lengths):
        yield _Piece(row=row, length=length, slots=longest)
    if not lengths:
        yield _Piece(row=0, length=1, slots=longest, counts=False)


def _packed_pieces(lengths: Sequence[int], cut: Cut) -> Iterator[_Piece]:
    total = 0
    for row, length in enumerate(lengths):
        piece = _Piece(row=row, length=length, slots=_up(length, cut.row_factor))
        total += piece.slots
        yield piece
    missing = _up(max(total, 1), cut.factor) - total
    if not lengths:
        yield _Piece(row=0, length=0, slots=missing, counts=False)
        return
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    while missing:
        slots = min(missing, _up(lengths[longest], cut.row_factor))
        length = min(slots, lengths[longest])
        yield _Piece(row=longest, length=length, slots=slots, counts=False)
        missing -= slots


def _up(length: int, factor: int) -> int:
    """The next multiple of `factor`."""
    return -(-length // factor) * factor


def local_slots(slots: Tensor, cut: Cut) -> Tensor:
    """This context-parallel rank's part of one sequence's slots."""
    if cut.cp == 1:
        return slots
    chunks = slots.chunk(2 * cut.cp)
    return torch.cat([chunks[cut.cp_rank], chunks[2 * cut.cp - 1 - cut.cp_rank]])
