"""One rank's share of a batch, in micro-batches that a pipeline can carry.

Padding is computed like everything else, so rows of like length go together: the share is sorted by
length, and cut where that saves more work than another pass costs. It is cut as well where one pass
would hold too many tokens. The sum over a step's rows does not depend on their order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.batch import Batch

# Padded tokens that a cut must save. A pass costs as much beside its arithmetic, on a small model.
_SAVING = 256
# Padded tokens of one pass at most, where a single row is not longer: a bound on activations.
_MOST_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch, at a length of their own.

    Attributes:
        tokens: [R, T] int64 for the model, on its device; rows beyond `len(batch)` are filler.
        batch: the real rows, at most R of them, perhaps none.
        rows: where in the whole batch they are.
    """

    tokens: Tensor
    batch: Batch
    rows: list[int]


def micro_batches(
    batch: Batch, share: range, *, size: int | None, stages: int, device: torch.device
) -> list[MicroBatch]:
    """Cuts one rank's rows into micro-batches.

    A pipeline sends activations of one fixed shape, so with several stages all micro-batches have
    the same number of rows (the last is filled up) and the whole batch's length. Otherwise rows are
    sorted by length, and each micro-batch is cut to its own longest. A rank without rows gets one
    micro-batch of a filler row: it takes part in every collective, and adds nothing.

    Args:
        batch: the whole batch.
        share: this rank's rows.
        size: rows of a micro-batch; null cuts by length, or so that a pipeline's stages overlap.
        stages: of the pipeline.
        device: where the model is.
    """
    lengths: list[int] = batch.lengths.tolist()
    rows = list(share)
    whole_length = batch.tokens.shape[1]
    if stages > 1:
        size = size or max(min(len(rows) // (2 * stages), _MOST_TOKENS // whole_length), 1)
    else:
        rows.sort(key=lambda row: -lengths[row])
    if size is not None:
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    else:
        groups = _by_length(rows, lengths) if rows else []
    result = []
    for group in groups or [[]]:
        real = batch.rows(torch.tensor(group, dtype=torch.int64))
        if stages == 1:
            real = _to_length(real, lengths[group[0]] if group else 1)
        real = _to_device(real, device)
        wanted = size if stages > 1 and size else max(len(group), 1)
        tokens = F.pad(real.tokens, (0, 0, 0, wanted - len(group)))
        result.append(MicroBatch(tokens=tokens, batch=real, rows=group))
    return result


def _by_length(rows: list[int], lengths: list[int]) -> list[list[int]]:
    """Cuts rows, longest first, where shorter ones would be padded by more than a pass is worth,
    and where a pass would be too large."""
    longest, count = lengths[rows[0]], len(rows)
    saving, cut = max(
        ((longest - lengths[row]) * (count - index), index) for index, row in enumerate(rows)
    )
    if saving < _SAVING:
        cut = max(_MOST_TOKENS // longest, 1)
    if cut >= count:
        return [rows]
    return _by_length(rows[:cut], lengths) + _by_length(rows[cut:], lengths)


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
