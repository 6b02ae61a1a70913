"""Keys and values of a batch of sequences, allocated once for the longest they can become.

Sequences are padded on the left, so that in every step all rows write the same slot: one plain
copy, where right-padded rows would need a scatter. Padding slots hold zeros (never uninitialised
memory: a masked NaN is still NaN times zero) and are masked where any row has them. What a slot's
position is, a row knows by its own padding; only differences of positions matter to rotary
embeddings, but positions are kept true, so that nothing depends on a row's neighbours.

A KV head's key and value lie in one tensor, so that a step writes both at once.
"""

import torch
from torch import Tensor


class KeyValueCache:
    """Cache of one batch.

    Attributes:
        layers: for each layer [rows, KV heads, 2, slots, head_dim], keys and then values.
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
        shape = (rows, heads, 2, slots, head_dim)
        self.layers = [torch.empty(shape, dtype=dtype) for _ in range(layers)]
        self.length = 0
        self.padding = padding
        self._mask = self._make_mask()

    def fill(self, rows: Tensor, pieces: list[Tensor], owners: Tensor, length: int) -> None:
        """Copies prefilled prompts into rows; several rows may share one prompt.

        Args:
            rows: [n] which rows.
            pieces: one a layer, [prompts, KV heads, 2, P, head_dim] with P at most `length`.
            owners: [n] which prompt each row continues.
            length: slots of the longest prompt in the cache; prompts end at it.
        """
        start = length - pieces[0].shape[3]
        for layer, piece in zip(self.layers, pieces, strict=True):
            layer[rows, :, :, :start] = 0
            layer[rows, :, :, start:length] = piece[owners]
        self.length = length

    def write(self, layer: int, heads: Tensor) -> Tensor:
        """Puts keys and values of the newest token into the last filled slot.

        Args:
            layer: its number, from 0.
            heads: [rows, KV heads, 2, head_dim].

        Returns:
            [rows * KV heads, 2, slots, head_dim], the layer's whole memory.
        """
        memory = self.layers[layer]
        memory.select(3, self.length - 1).copy_(heads)
        return memory.flatten(0, 1)

    def mask(self) -> Tensor | None:
        """[rows * KV heads, 1, length]: 0, or -inf on padding; None where no row has any."""
        return None if self._mask is None else self._mask[..., : self.length]

    def positions(self) -> Tensor:
        """[rows] position of the token that comes next."""
        return self.length - self.padding

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these ([n] int64), so that finished sequences cost nothing more."""
        for layer, full in enumerate(self.layers):
            kept = full.new_empty((len(rows), *full.shape[1:]))
            filled = full[..., : self.length, :]
            torch.index_select(filled, 0, rows, out=kept[..., : self.length, :])
            self.layers[layer] = kept
        self.padding = self.padding[rows]
        self._mask = self._make_mask()

    def _make_mask(self) -> Tensor | None:
        if not bool(self.padding.any()):
            return None
        _, heads, _, slots, _ = self.layers[0].shape
        hidden = torch.arange(slots) < self.padding[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.layers[0].dtype)
        mask.masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(heads, 0)[:, None]
