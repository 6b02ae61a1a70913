"""The clipped policy-gradient loss of one token."""

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) is far outside any clip range; beyond it exp overflows, and inf * 0 would be NaN.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedTokens:
    """Per-token parts of the clipped loss.

    Attributes:
        loss: [B, T] with gradient.
        ratio: [B, T] importance ratio, without gradient.
        clipped: [B, T] 1.0 where the clipped branch is the one that counts, so the gradient is 0.
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
) -> ClippedTokens:
    """PPO's clipped surrogate, token by token (arXiv 1707.06347, eq. 7), to be minimised.

        r = exp(log p - log p_old)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Two bounds of their own are DAPO's "clip-higher" (arXiv 2503.14476, eq. 10). There is no dual
    clip: with A < 0 a large ratio is not bounded from above.

    Args:
        log_probs: [B, T] of the policy, with gradient; finite everywhere.
        old_log_probs: [B, T] of the policy that the ratio is taken against.
        advantages: [B, T], or [B, 1] where all tokens of a sequence share one.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return ClippedTokens(
        loss=torch.maximum(free, bounded),
        ratio=ratio.detach(),
        clipped=(bounded > free).float(),
    )
