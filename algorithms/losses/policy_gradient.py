"""The policy-gradient loss of one token: a bounded ratio, or a weighted log-probability."""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.losses.divergence import LOG_RATIO_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A surrogate loss, token by token.

    Attributes:
        loss: [B, T] with gradient.
        ratio: [B, T] importance ratio p / p_old, without gradient.
        clipped: [B, T] 1.0 where the bound of the ratio is what counts, and not the ratio.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), to be minimised.

        r = exp(log_ratio)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Two bounds of their own are DAPO's "clip-higher" (arXiv 2503.14476, eq. 10). With A < 0 a large
    ratio is not bounded from above, but by a dual clip (arXiv 1912.09729, eq. 5):

        loss = min(loss, -dual_clip A)   where A < 0

    Where a bound counts there is no gradient.

    Args:
        log_ratio: [B, T] log p - log p_old, of a token or of its whole sequence, with gradient.
        advantages: [B, T], or [B, 1] where all tokens of a sequence share one.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: bound of the ratio where A < 0; None for none.
    """
    ratio = bounded_ratio(log_ratio)
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        most = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return TokenLoss(loss=loss, ratio=ratio.detach(), clipped=clipped.float())


def weighted_log_prob_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, low: float, high: float
) -> TokenLoss:
    """REINFORCE with a bounded importance weight (CISPO, arXiv 2506.13585, eq. 4 and 5).

        w = clip(exp(log p - log p_old), low, high)      without gradient
        loss = -w A log p

    The gradient, -w A d log p, reaches every token, also those whose weight is at a bound.

    Args:
        log_probs: [B, T] of the policy, with gradient; finite everywhere.
        old_log_probs: [B, T] of the policy that sampled.
        advantages: [B, T].
        low: least weight.
        high: largest weight.
    """
    ratio = bounded_ratio(log_probs.detach() - old_log_probs)
    weight = ratio.clamp(low, high)
    return TokenLoss(
        loss=-weight * advantages * log_probs, ratio=ratio, clipped=(weight != ratio).float()
    )


def reinforce_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A log p, without a weight (Williams, 1992). The ratio is there to be watched only.

    Args:
        log_probs: [B, T] of the policy, with gradient; finite everywhere.
        old_log_probs: [B, T] of the policy that sampled.
        advantages: [B, T].
    """
    ratio = bounded_ratio(log_probs.detach() - old_log_probs)
    return TokenLoss(loss=-advantages * log_probs, ratio=ratio, clipped=torch.zeros_like(ratio))


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), which is kept from overflow: inf * 0 would be NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def largest_per_sequence(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """(sum over sequences of the largest value in each, number of sequences that are trained).

    A maximum over a whole batch cannot be summed over micro-batches; this can.
    """
    largest = values.detach().masked_fill(mask == 0, 0.0).amax(dim=1)
    return float(largest.sum()), float((mask.sum(dim=1) > 0).sum())
