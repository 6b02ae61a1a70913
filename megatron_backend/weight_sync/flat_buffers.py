"""Slices for one peer, laid end to end in buffers of a bounded size.

Both sides make the same buffers of the same list, so no message needs a header. A slice that is
larger than a buffer is cut further, so that a sync takes the same memory for any model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_backend.weight_sync.plan import Piece, Transfer

BUFFER_BYTES = 32 << 20
# A view of another dtype needs an aligned start.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """A slice and its place in a buffer."""

    transfer: Transfer
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        """Its bytes in a buffer, as what they are."""
        stop = self.offset + self._bytes
        return buffer[self.offset : stop].view(self.dtype).view(self.shape)

    @property
    def stop(self) -> int:
        """Where the next segment may begin."""
        return self.offset + -(-self._bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def _bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def flat_buffers(
    transfers: Sequence[Transfer], targets: Sequence[Piece], *, limit: int = BUFFER_BYTES
) -> list[list[Segment]]:
    """The segments of each buffer.

    Args:
        transfers: between two ranks.
        targets: what the receiving rank holds.
        limit: bytes of a buffer; one index of a slice may be larger.
    """
    buffers: list[list[Segment]] = [[]]
    for transfer in transfers:
        for segment in _segments(transfer, targets[transfer.target_piece], limit):
            used = buffers[-1][-1].stop if buffers[-1] else 0
            if buffers[-1] and used + segment.stop > limit:
                buffers.append([])
                used = 0
            buffers[-1].append(replace(segment, offset=used))
    return [buffer for buffer in buffers if buffer]


def torch_dtype(piece: Piece) -> torch.dtype:
    """What a piece's `dtype` names."""
    dtype: torch.dtype = getattr(torch, piece.dtype.removeprefix("torch."))
    return dtype


def _segments(transfer: Transfer, piece: Piece, limit: int) -> Iterator[Segment]:
    dtype = torch_dtype(piece)
    if transfer.dim is None:
        yield Segment(transfer, 0, (), dtype)
        return
    rest = math.prod(piece.shape) // max(piece.shape[transfer.dim], 1) * dtype.itemsize
    step = max(1, limit // max(rest, 1))
    for start in range(0, transfer.length, step):
        length = min(step, transfer.length - start)
        shape = list(piece.shape)
        shape[transfer.dim] = length
        part = replace(
            transfer,
            source_start=transfer.source_start + start,
            target_start=transfer.target_start + start,
            length=length,
        )
        yield Segment(part, 0, tuple(shape), dtype)
