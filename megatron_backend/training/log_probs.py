"""Exact log-probs and entropies from logits whose vocabulary is split over ranks.

With logits x, temperature T, y = x / T, m = max y, and Z = sum exp(y - m) over the whole real
vocabulary (each rank sums its own columns, then the ranks add up):

    log p(t) = (y_t - m) - log Z
    entropy  = log Z - sum exp(y - m) (y - m) / Z
    d log p(t) / d x_j = (1[j = t] - p_j) / T

The gradient needs no communication, since the ranks share Z. Temperature divides the logits before
anything else, so a sampler's and a trainer's log-probs agree. Padded columns are left out of every
sum, and get no gradient. The logits themselves are never written to: what comes after reads them
as they were.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from megatron_backend.models.vocabulary import real_columns


class _VocabularyLogProbs(torch.autograd.Function):
    """Forward and backward as the module's text says."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        width = logits.shape[-1]
        real = real_columns(vocab_size, width=width, tp_rank=rank)
        shifted = logits.float() / temperature
        maximum = (
            shifted[..., :real].amax(-1) if real else shifted.new_full(targets.shape, -torch.inf)
        )
        if size > 1:
            all_reduce(maximum, ReduceOp.MAX, group)
        shifted.sub_(maximum.unsqueeze(-1))
        shifted[..., real:] = 0.0  # finite, so that 0 * shifted below is 0
        local = targets - rank * width
        here = (local >= 0) & (local < real)
        local = local.clamp(0, width - 1).unsqueeze(-1)
        chosen = shifted.gather(-1, local).squeeze(-1) * here
        exponentials = shifted.exp()
        exponentials[..., real:] = 0.0
        moment = (exponentials * shifted).sum(-1)
        sums = torch.stack([chosen, exponentials.sum(-1), moment])
        if size > 1:
            all_reduce(sums, ReduceOp.SUM, group)
        chosen, total, moment = sums.unbind()
        probabilities = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, here)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        log_total = total.log()
        entropy = log_total - moment / total
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here = ctx.saved_tensors
        scale = (gradients[0] / ctx.temperature).unsqueeze(-1)
        grad_logits = probabilities * -scale
        grad_logits.scatter_add_(-1, local, scale * here.unsqueeze(-1))
        return grad_logits.to(ctx.dtype), None, None, None, None


def vocabulary_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies of the distributions they are drawn from.

    Args:
        logits: [..., V / tp], this rank's columns of the padded vocabulary.
        targets: [...] int64, token ids of the whole vocabulary, the same on all ranks.
        vocab_size: number of real tokens; later columns are padding.
        temperature: divides the logits.
        group: tensor-parallel ranks; None where the vocabulary is whole.

    Returns:
        log_probs [...] float32, with gradient; entropy [...] float32 in nats, without.
    """
    log_probs, entropy = _VocabularyLogProbs.apply(logits, targets, vocab_size, temperature, group)
    return log_probs, entropy
