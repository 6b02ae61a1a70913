"""One rank's share of a batch, in micro-batches that a pipeline can carry."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch, at a length of their own.

    Attributes:
        tokens: [R, T] int64 for the model, on its device; rows beyond `len(batch)` are filler.
        batch: the real rows, at most R of them, perhaps none.
    """

    tokens: Tensor
    batch: Batch


def micro_batches(
    batch: Batch, share: range, *, size: int | None, pipelined: bool, device: torch.device
) -> list[MicroBatch]:
    """Cuts one rank's rows into micro-batches.

    A pipeline sends activations of one fixed shape, so with `pipelined` all micro-batches have the
    same number of rows (the last is filled up) and the whole batch's length. Otherwise each is cut
    to its own longest row. A rank without rows gets one micro-batch of a filler row: it takes part
    in every collective, and adds nothing.

    Args:
        batch: the whole batch.
        share: this rank's rows.
        size: rows of a micro-batch; null takes the whole share at once.
        pipelined: whether there is more than one pipeline stage.
        device: where the model is.
    """
    size = size or max(len(share), 1)
    starts = range(0, len(share), size) if len(share) else range(1)
    result = []
    for start in starts:
        rows = share[start : start + size]
        real = batch.rows(slice(rows.start, rows.stop))
        if not pipelined:
            real = _to_length(real, int(real.lengths.max()) if len(real) else 1)
        real = _to_device(real, device)
        wanted = size if pipelined else max(len(real), 1)
        tokens = F.pad(real.tokens, (0, 0, 0, wanted - len(real)))
        result.append(MicroBatch(tokens=tokens, batch=real))
    return result


def _to_length(batch: Batch, length: int) -> Batch:
    return Batch(
        tokens=batch.tokens[:, :length],
        lengths=batch.lengths,
        loss_mask=batch.loss_mask[:, :length],
        per_token={name: tensor[:, :length] for name, tensor in batch.per_token.items()},
        per_sequence=batch.per_sequence,
    )


def _to_device(batch: Batch, device: torch.device) -> Batch:
    def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device=device) for name, tensor in tensors.items()}

    return Batch(
        tokens=batch.tokens.to(device=device),
        lengths=batch.lengths.to(device=device),
        loss_mask=batch.loss_mask.to(device=device),
        per_token=move(batch.per_token),
        per_sequence=move(batch.per_sequence),
    )
