"""How far the generator's distribution is from the trainer's, and what to do about it.

A generator computes the same function as the trainer with other kernels, another layout, another
number format, and perhaps older weights. So what it sampled is not quite the policy's own. The
ratio of the two probabilities of each token says how far off it was. Importance sampling weighs by
it, with a bound, since a product of many ratios has a variance without one (truncated importance
sampling: Ionides, 2008; for language models: Yao et al., "Your efficient RL framework secretly
brings you off-policy RL training", 2025).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from algorithms.batch import Batch, masked_pair
from algorithms.losses.divergence import estimate_kl
from algorithms.losses.policy_gradient import bounded_ratio, largest_per_sequence
from service.spec import RolloutCorrection


def correction_weights(
    old_log_probs: Tensor, batch: Batch, correction: RolloutCorrection
) -> Tensor:
    """[B, T] weights without gradient.

        token:     w_t = p_old(t) / p_rollout(t)
        sequence:  w = the product of w_t over a row's trained tokens, for each of them
        truncate:  min(max(w, low), high)
        mask:      w where low <= w <= high, else 0

    What is masked out adds nothing to the surrogate loss. It stays in the step's counts, which are
    taken before the ranks know any weight.

    Args:
        old_log_probs: [B, T] by the trainer before the first update, finite.
        batch: has `rollout_log_probs`.
        correction: level, mode and bounds.
    """
    log_ratio = _log_ratio(old_log_probs.detach(), batch)
    if correction.level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    weights = bounded_ratio(log_ratio)
    if correction.mode == "truncate":
        return weights.clamp(correction.low, correction.high)
    inside = (weights >= correction.low) & (weights <= correction.high)
    return torch.where(inside, weights, 0.0)


def rollout_mismatch(old_log_probs: Tensor, batch: Batch) -> Mapping[str, tuple[float, float]]:
    """How far the trainer's log-probs, before any update, are from the generator's.

    Both should be 0 but for rounding. Anything else means that trainer and generator do not
    compute the same function: dropout, a shifted position, a temperature, stale weights.
    """
    if "rollout_log_probs" not in batch.per_token:
        return {}
    mask, old = batch.loss_mask, old_log_probs.detach()
    log_ratio = _log_ratio(old, batch)
    return {
        "rollout_kl": masked_pair(estimate_kl(old - log_ratio, old, "k3"), mask),
        "rollout_ratio_deviation": largest_per_sequence(
            (bounded_ratio(log_ratio) - 1.0).abs(), mask
        ),
    }


def _log_ratio(old_log_probs: Tensor, batch: Batch) -> Tensor:
    """[B, T] log p_old - log p_rollout; 0 where nothing is trained."""
    nothing = batch.loss_mask == 0
    difference = old_log_probs - batch.per_token["rollout_log_probs"]
    return difference.masked_fill(nothing, 0.0)
