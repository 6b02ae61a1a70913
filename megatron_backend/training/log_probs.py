"""Exact log-probs and entropies straight from hidden states, never with a whole matrix of logits.

A vocabulary is wide: the logits of one micro-batch are often larger than all its activations, and
in float32 they are what runs out of memory. So the output layer is part of this function. Tokens go
through it some at a time, and of each chunk's logits only four numbers a token stay.

With logits x = c(h W^T) (c caps them softly where the model does so), temperature T, y = x / T, and
m = max y, each rank sums over its own columns of the real vocabulary

    s = sum exp(y - m),   e = sum exp(y - m) (y - m),   y_t where it holds the target t

and the ranks then put these together, moved to the maximum M of all of them:

    S = sum_r exp(m_r - M) s_r,   E = sum_r exp(m_r - M) (e_r + (m_r - M) s_r)
    log p(t) = (y_t - M) - log S
    entropy  = log S - E / S
    d log p(t) / d y_j = 1[j = t] - p_j

The backward pass computes a chunk's logits again, or finds exp(y - m) where it was kept: the first
chunks keep it, up to a fixed number of bytes, since on a small model nothing else is worth more.
Temperature divides the logits before anything else, so a sampler's and a trainer's log-probs agree.
Padded columns are not computed at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from megatron_backend.models.vocabulary import real_columns

CHUNK_BYTES = 2**26
"""Of one chunk's logits in float32, at most, where it has more than `_LEAST_ROWS` tokens."""
KEPT_BYTES = 2**28
"""Of exponentials kept for the backward pass, at most, over all chunks."""
_LEAST_ROWS = 64
# Stands for the maximum of no columns at all; exp(_LOWEST - M) is 0, and it is finite.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How logits become log-probs.

    Attributes:
        size: number of real tokens; later columns are padding.
        temperature: divides the logits.
        softcap: c in c tanh(x / c), which the model applies to its logits; None where it does not.
        group: tensor-parallel ranks; None where the vocabulary is whole.
    """

    size: int
    temperature: float = 1.0
    softcap: float | None = None
    group: ProcessGroup | None = None

    def columns(self, width: int) -> tuple[int, int]:
        """(number of this rank's first token, how many of its `width` columns are real)."""
        rank = 0 if self.group is None else self.group.rank()
        return rank * width, real_columns(self.size, width=width, tp_rank=rank)


class _LinearLogProbs(torch.autograd.Function):
    """Forward and backward as the module's text says."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        first, real = vocabulary.columns(len(weight))
        local = targets - first
        here = (local >= 0) & (local < real)
        local = local.clamp(0, max(real - 1, 0))
        maximum = hidden.new_full(targets.shape, _LOWEST, dtype=torch.float32)
        sums = hidden.new_zeros((3, *targets.shape), dtype=torch.float32)
        kept, room = [], KEPT_BYTES if any(ctx.needs_input_grad) else 0
        for rows in _chunks(len(hidden), real):
            scaled, _ = _scaled_logits(hidden[rows], weight[:real], vocabulary)
            maximum[rows] = scaled.amax(-1)
            scaled.sub_(maximum[rows].unsqueeze(-1))
            chosen = scaled.gather(-1, local[rows].unsqueeze(-1)).squeeze(-1)
            exponentials = scaled.exp()
            moment = torch.linalg.vecdot(exponentials, scaled)
            sums[:, rows] = torch.stack([chosen, exponentials.sum(-1), moment])
            room -= exponentials.nbytes
            if room >= 0 and vocabulary.softcap is None:
                kept.append(exponentials)
        log_probs, entropy, log_total = _combine(maximum, sums, here, vocabulary.group)
        ctx.vocabulary, ctx.kept = vocabulary, kept
        ctx.save_for_backward(hidden, weight, local, here, maximum, log_total)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, here, maximum, log_total = ctx.saved_tensors
        _, real = ctx.vocabulary.columns(len(weight))
        scale = gradients[0] / ctx.vocabulary.temperature
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        kept, ctx.kept = ctx.kept, []  # used up here; a second pass would compute them again
        for index, rows in enumerate(_chunks(len(hidden), real)):
            slope = None
            if index < len(kept):
                grad = kept[index].mul_((maximum[rows] - log_total[rows]).exp().unsqueeze(-1))
            else:
                scaled, slope = _scaled_logits(hidden[rows], weight[:real], ctx.vocabulary)
                grad = scaled.sub_(log_total[rows].unsqueeze(-1)).exp_()
            grad.mul_(-scale[rows].unsqueeze(-1))
            chosen = (scale[rows] * here[rows]).unsqueeze(-1)
            grad.scatter_add_(-1, local[rows].unsqueeze(-1), chosen)
            grad = (grad if slope is None else grad.mul_(slope)).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight[:real], out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight[:real], grad.t(), hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies of the distributions they are drawn from.

    Args:
        hidden: [N, H], what the output layer reads; the same on all tensor-parallel ranks. Its
            gradient is this rank's share: the sum over the ranks is the whole.
        weight: [V / tp, H], this rank's rows of the output layer.
        targets: [N] int64, token ids of the whole vocabulary, the same on all ranks.
        vocabulary: see `Vocabulary`.

    Returns:
        log_probs [N] float32, with gradient; entropy [N] float32 in nats, without.
    """
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, targets, vocabulary)
    return log_probs, entropy


def _chunks(count: int, width: int) -> Iterator[slice]:
    """Runs of tokens whose logits of `width` columns are small enough; none of no columns."""
    rows = max(CHUNK_BYTES // (4 * max(width, 1)), _LEAST_ROWS)
    for start in range(0, count if width else 0, rows):
        yield slice(start, min(start + rows, count))


def _scaled_logits(
    hidden: Tensor, weight: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor | None]:
    """y [n, V] float32 of the module's text; d x / d (h W^T) where logits are capped."""
    logits = torch.mm(hidden, weight.t()).float()
    slope = None
    if vocabulary.softcap is not None:
        capped = logits.div_(vocabulary.softcap).tanh_()
        slope = 1.0 - capped * capped
        logits = capped.mul_(vocabulary.softcap)
    if vocabulary.temperature != 1.0:
        logits.div_(vocabulary.temperature)
    return logits, slope


def _combine(
    maximum: Tensor, sums: Tensor, here: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropy, M + log S) of all ranks' columns, from each rank's own."""
    chosen, total, moment = sums.unbind()
    if group is not None and group.size() > 1:
        largest = maximum.clone()
        all_reduce(largest, ReduceOp.MAX, group)
        move = maximum - largest
        factor = move.exp()
        own = (chosen + move) * here, total * factor, (moment + move * total) * factor
        sums = torch.stack(own)
        all_reduce(sums, ReduceOp.SUM, group)
        (chosen, total, moment), maximum = sums.unbind(), largest
    log_total = total.log()
    return chosen - log_total, log_total - moment / total, maximum + log_total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` is float32 and the others perhaps are not."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
