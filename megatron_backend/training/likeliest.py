"""The likeliest tokens straight from hidden states, of a vocabulary that may be split over ranks.

Each rank finds the likeliest of its own columns, and all then choose among what all have found: the
k likeliest tokens are among the k likeliest of each part. As in `log_probs`, tokens go through the
output layer some at a time, and no matrix of tokens and vocabulary is ever whole.

Where logits are equal the lower token id comes first. `torch.topk` promises no order there, so what
is sorted are whole numbers of which no two are the same: a logit's bits, then its token's id.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather

from megatron_backend.training.log_probs import Vocabulary, row_chunks, scaled_logits

_ID_VALUES = 2**32


@torch.no_grad()
def likeliest(
    hidden: Tensor, weight: Tensor, count: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens, likeliest first; all tokens where there are fewer.

    Args:
        hidden: [N, H], what the output layer reads; the same on all tensor-parallel ranks.
        weight: [V / tp, H], this rank's rows of the output layer.
        count: K, at least 1.
        vocabulary: see `Vocabulary`.

    Returns:
        ids [N, K] int64 and log_probs [N, K] float32, the same on all ranks.
    """
    first, real = vocabulary.columns(len(weight))
    width = min(count, len(weight))
    ids = torch.full((len(hidden), width), vocabulary.size, device=hidden.device)
    logits = hidden.new_full(ids.shape, -torch.inf, dtype=torch.float32)
    totals = hidden.new_full((len(hidden), 1), -torch.inf, dtype=torch.float32)
    for rows in row_chunks(len(hidden), real):
        scaled, _ = scaled_logits(hidden[rows], weight[:real], vocabulary)
        totals[rows] = scaled.logsumexp(-1, keepdim=True)
        columns = torch.arange(real, device=hidden.device).expand(scaled.shape)
        chosen = _largest(scaled, columns, min(width, real))
        ids[rows, : chosen.shape[1]] = first + chosen
        logits[rows, : chosen.shape[1]] = scaled.gather(-1, chosen)
    ids, logits = _of_all(ids, vocabulary.group), _of_all(logits, vocabulary.group)
    total = _of_all(totals, vocabulary.group).logsumexp(-1, keepdim=True)
    chosen = _largest(logits, ids, min(count, vocabulary.size))
    return ids.gather(-1, chosen), logits.gather(-1, chosen) - total


def _largest(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """[n, count] columns of the largest values, in order; of equal ones the lower id is first.

    Args:
        values: [n, C] float32.
        ids: [n, C] int64, below 2^32.
        count: at most C.
    """
    bits = (values + 0.0).view(torch.int32)  # of -0 and 0 the bits differ
    # The bits of floats are in the floats' order but for the negative ones, which run backwards.
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys.mul_(_ID_VALUES).add_(_ID_VALUES - 1).sub_(ids)  # in place: it is a whole chunk
    return keys.topk(count, dim=-1).indices


def _of_all(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """[N, C x ranks] from [N, C] of each rank, in their order."""
    if group is None or group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    all_gather(parts, values, group)
    return torch.cat(parts, dim=-1)
