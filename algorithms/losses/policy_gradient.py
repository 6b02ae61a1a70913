"""The clipped policy-gradient loss of one token."""

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) is far outside any clip range; beyond it exp overflows, and inf * 0 would be NaN.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A surrogate loss, token by token.

    Attributes:
        loss: [B, T] with gradient.
        ratio: [B, T] importance ratio, without gradient.
        clipped: [B, T] 1.0 where the ratio is bounded, so that it has no gradient.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate, token by token (arXiv 1707.06347, eq. 7), to be minimised.

        r = exp(log p - log p_old)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Two bounds of their own are DAPO's "clip-higher" (arXiv 2503.14476, eq. 10). With A < 0 a large
    ratio is not bounded from above, but by a dual clip (arXiv 1912.09729, eq. 5):

        loss = min(loss, -dual_clip A)   where A < 0

    Args:
        log_probs: [B, T] of the policy, with gradient; finite everywhere.
        old_log_probs: [B, T] of the policy that the ratio is taken against.
        advantages: [B, T], or [B, 1] where all tokens of a sequence share one.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: bound of the ratio where A < 0; None for none.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        most = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return TokenLoss(loss=loss, ratio=ratio.detach(), clipped=clipped.float())


def largest_per_sequence(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """(sum over sequences of the largest value in each, number of sequences that are trained).

    A maximum over a whole batch cannot be summed over micro-batches; this can.
    """
    largest = values.detach().masked_fill(mask == 0, 0.0).amax(dim=1)
    return float(largest.sum()), float((mask.sum(dim=1) > 0).sum())
