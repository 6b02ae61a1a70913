"""Keys and values of a batch of sequences, allocated once for the longest they can become.

Sequences are padded on the left, so that in every step all rows write the same slot: one plain
copy, where right-padded rows would need a scatter. Padding slots hold zeros (never uninitialised
memory: a masked NaN is still NaN times zero) and are masked where any row has them. What a slot's
position is, a row knows by its own padding; only differences of positions matter to rotary
embeddings, but positions are kept true, so that nothing depends on a row's neighbours.
"""

import torch
from torch import Tensor


class KeyValueCache:
    """Cache of one batch: for each layer [rows, KV heads, slots, head_dim] keys and values.

    Attributes:
        keys, values: one tensor a layer.
        length: slots that are filled, the same for all rows.
        padding: [rows] int64, how many of a row's first slots are padding.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        padding: Tensor,
    ) -> None:
        shape = (rows, heads, slots, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype) for _ in range(layers)]
        self.length = 0
        self.padding = padding
        self._mask = _mask(padding, slots, dtype)

    def fill(
        self, rows: Tensor, keys: list[Tensor], values: list[Tensor], owners: Tensor, length: int
    ) -> None:
        """Copies prefilled prompts into rows; several rows may share one prompt.

        Args:
            rows: [n] which rows.
            keys, values: one a layer, [prompts, KV heads, P, head_dim] with P at most `length`.
            owners: [n] which prompt each row continues.
            length: slots of the longest prompt in the cache; prompts end at it.
        """
        start = length - keys[0].shape[2]
        for cached, new in ((self.keys, keys), (self.values, values)):
            for layer, source in zip(cached, new, strict=True):
                layer[rows, :, :start] = 0
                layer[rows, :, start:length] = source[owners]
        self.length = length

    def mask(self) -> Tensor | None:
        """[rows, 1, 1, length]: 0, or -inf on padding; None where no row has any."""
        return None if self._mask is None else self._mask[..., : self.length]

    def positions(self) -> Tensor:
        """[rows] position of the token that comes next."""
        return self.length - self.padding

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these ([n] int64), so that finished sequences cost nothing more."""
        for cached in (self.keys, self.values):
            for layer, full in enumerate(cached):
                kept = full.new_empty((len(rows), *full.shape[1:]))
                torch.index_select(
                    full[:, :, : self.length], 0, rows, out=kept[:, :, : self.length]
                )
                cached[layer] = kept
        self.padding = self.padding[rows]
        self._mask = _mask(self.padding, self.keys[0].shape[2], self.keys[0].dtype)


def _mask(padding: Tensor, slots: int, dtype: torch.dtype) -> Tensor | None:
    if not bool(padding.any()):
        return None
    hidden = torch.arange(slots) < padding[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
