"""Exact log-probs and entropies straight from hidden states, never with a whole matrix of logits.

A vocabulary is wide: the logits of one micro-batch are often larger than all its activations, and
in float32 they are what runs out of memory. So the output layer is part of this function. Tokens go
through it some at a time, and of each chunk's logits only a few numbers a token stay.

With logits x = c(h W^T) (c caps them softly where the model does so), temperature T, y = x / T, and
m = max y, each rank sums over its own columns of the real vocabulary

    s = sum exp(y - m),   e = sum exp(y - m) (y - m),   y_t where t is asked for and here

and the ranks then put these together, moved to the maximum M of all of them:

    S = sum_r exp(m_r - M) s_r,   E = sum_r exp(m_r - M) (e_r + (m_r - M) s_r)
    log p(t) = (y_t - M) - log S
    H        = log S - E / S, the entropy
    d log p(t) / d y_j = 1[j = t] - p_j
    d H / d y_j        = -p_j (log p_j + H)

The backward pass computes a chunk's logits again, or finds exp(y - m) where it was kept: the first
chunks keep it, up to a fixed number of bytes, since on a small model nothing else is worth more.
Temperature divides the logits before anything else, so a sampler's and a trainer's log-probs agree.
Padded columns are not computed at all.
"""

from collections.abc import Iterator, Sequence
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
        ctx: Any, hidden: Tensor, weight: Tensor, asked: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        first, real = vocabulary.columns(len(weight))
        local = asked - first
        here = (local >= 0) & (local < real)
        local = local.clamp(0, max(real - 1, 0))
        maximum = hidden.new_full((len(hidden),), _LOWEST, dtype=torch.float32)
        sums = hidden.new_zeros((len(hidden), 2 + asked.shape[1]), dtype=torch.float32)
        kept, room = [], KEPT_BYTES if any(ctx.needs_input_grad) else 0
        for rows in row_chunks(len(hidden), real):
            scaled, _ = scaled_logits(hidden[rows], weight[:real], vocabulary)
            maximum[rows] = scaled.amax(-1)
            scaled.sub_(maximum[rows].unsqueeze(-1))
            sums[rows, 2:] = scaled.gather(-1, local[rows])
            exponentials = scaled.exp()
            sums[rows, 0] = exponentials.sum(-1)
            sums[rows, 1] = torch.linalg.vecdot(exponentials, scaled)
            room -= exponentials.nbytes
            if room >= 0 and vocabulary.softcap is None:
                kept.append(exponentials)
        log_probs, entropy, log_total = _combine(maximum, sums, here, vocabulary.group)
        ctx.vocabulary, ctx.kept = vocabulary, kept
        ctx.save_for_backward(hidden, weight, local, here, maximum, log_total, entropy)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, here, maximum, log_total, entropy = ctx.saved_tensors
        _, real = ctx.vocabulary.columns(len(weight))
        pull = _Pull.of(gradients, local, here, entropy, ctx.vocabulary.temperature)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        kept, ctx.kept = ctx.kept, []  # used up here; a second pass would compute them again
        for index, rows in enumerate(row_chunks(len(hidden), real)):
            slope = None
            if index < len(kept):
                grad = kept[index].mul_((maximum[rows] - log_total[rows]).exp().unsqueeze(-1))
            else:
                scaled, slope = scaled_logits(hidden[rows], weight[:real], ctx.vocabulary)
                grad = scaled.sub_(log_total[rows].unsqueeze(-1)).exp_()
            grad = pull.on_logits(grad, rows)
            grad = (grad if slope is None else grad.mul_(slope)).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight[:real], out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight[:real], grad.t(), hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    """What a loss's gradient does to the logits of each token.

    Attributes:
        probabilities: [N], minus the factor of p_j.
        log_probs: [N, M], what is added at the columns `local`; 0 where another rank holds them.
            None where no log-prob has a gradient.
        entropies: [N], the factor of -p_j log p_j; None where no entropy has a gradient.
        local: [N, M], columns of this rank.
    """

    probabilities: Tensor
    log_probs: Tensor | None
    entropies: Tensor | None
    local: Tensor

    @classmethod
    def of(
        cls,
        gradients: Sequence[Tensor | None],
        local: Tensor,
        here: Tensor,
        entropy: Tensor,
        temperature: float,
    ) -> "_Pull":
        """From gradients of log-probs [N, M] and of entropies [N]."""
        of_log_probs, of_entropy = (g if g is None else g / temperature for g in gradients)
        probabilities = torch.zeros_like(entropy)
        if of_log_probs is not None:
            probabilities = of_log_probs.sum(-1)
            of_log_probs = of_log_probs * here
        if of_entropy is not None:
            probabilities = probabilities + of_entropy * entropy
        return cls(
            probabilities=probabilities,
            log_probs=of_log_probs,
            entropies=of_entropy,
            local=local,
        )

    def on_logits(self, chunk: Tensor, rows: slice) -> Tensor:
        """[n, V], from the probabilities of these rows, which are overwritten."""
        spread = None
        if self.entropies is not None:
            # entr(p) = -p log p, and 0 where p is 0
            spread = torch.special.entr(chunk).mul_(self.entropies[rows].unsqueeze(-1))
        chunk.mul_(-self.probabilities[rows].unsqueeze(-1))
        if self.log_probs is not None:
            chunk.scatter_add_(-1, self.local[rows], self.log_probs[rows])
        return chunk if spread is None else chunk.add_(spread)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, asked: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens `asked` for, and entropies of the distributions that they are from.

    A gradient of the entropies costs one more chunk in the backward pass; where no loss reads them,
    nothing.

    Args:
        hidden: [N, H], what the output layer reads; the same on all tensor-parallel ranks. Its
            gradient is this rank's share: the sum over the ranks is the whole.
        weight: [V / tp, H], this rank's rows of the output layer.
        asked: [N, M] int64, token ids of the whole vocabulary, the same on all ranks. One may stand
            there twice.
        vocabulary: see `Vocabulary`.

    Returns:
        log_probs [N, M] float32 and entropy [N] float32 in nats, both with gradient.
    """
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, asked, vocabulary)
    return log_probs, entropy


def row_chunks(count: int, width: int) -> Iterator[slice]:
    """Runs of tokens whose logits of `width` columns are small enough; none of no columns."""
    rows = max(CHUNK_BYTES // (4 * max(width, 1)), _LEAST_ROWS)
    for start in range(0, count if width else 0, rows):
        yield slice(start, min(start + rows, count))


def scaled_logits(
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
    """(log-probs [N, M], entropy, M + log S) of all ranks' columns, from each rank's own.

    Args:
        maximum: [N] m.
        sums: [N, 2 + M]: s, e, and y_t - m of each token that is asked for.
        here: [N, M] bool, which of these are in this rank's columns.
        group: the ranks.
    """
    if group is not None and group.size() > 1:
        largest = maximum.clone()
        all_reduce(largest, ReduceOp.MAX, group)
        move = (maximum - largest).unsqueeze(-1)
        total, moment, chosen = sums.tensor_split((1, 2), dim=-1)
        factor = move.exp()
        own = total * factor, (moment + move * total) * factor, (chosen + move) * here
        sums = torch.cat(own, dim=-1)
        all_reduce(sums, ReduceOp.SUM, group)
        maximum = largest
    total, moment = sums[:, 0], sums[:, 1]
    log_total = total.log()
    log_probs = sums[:, 2:] - log_total.unsqueeze(-1)
    return log_probs, log_total - moment / total, maximum + log_total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` is float32 and the others perhaps are not."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
