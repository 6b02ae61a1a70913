"""The order of training rows, with a cursor that a checkpoint can hold.

The cursor is one number: how many rows have been drawn since the job began. Row p of the whole
sequence is entry `p mod size` of epoch `p div size`, and each epoch has an order of its own that
depends on nothing but the seed and the epoch. So a resumed run, whatever its layout, draws what
the uninterrupted one would have drawn. A batch that does not divide the epoch runs over into the
next: batches keep their size, and no row is lost.
"""

from dataclasses import dataclass

import torch

from algorithms.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Rows of one batch: indices, and where they lie in the whole sequence (end exclusive)."""

    indices: list[int]
    epoch: int
    start: int
    end: int


class Sampler:
    """Endless epochs over `size` rows, each row once an epoch."""

    def __init__(self, size: int, *, seed: int, position: int = 0) -> None:
        if size < 1:
            raise ValueError("no rows to draw from")
        if position < 0:
            raise ValueError("position must not be negative")
        self.size = size
        self.position = position
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def draw(self, count: int) -> Draw:
        """The next `count` rows; the cursor moves past them."""
        start, end = self.position, self.position + count
        indices = [self._row(position) for position in range(start, end)]
        self.position = end
        return Draw(indices=indices, epoch=start // self.size, start=start, end=end)

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "epoch", epoch))
            self._order = torch.randperm(self.size, generator=generator).tolist()
            self._epoch = epoch
        return self._order[place]
