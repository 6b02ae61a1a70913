"""What is taken off an episode's rewards before they become advantages."""

from dataclasses import replace

import torch
from torch import Tensor

from algorithms.losses.divergence import estimate_kl
from algorithms.samples import Rollout
from service.spec import OverlongPenalty
from service.spec.algorithms.policy_gradient import KlEstimator


def length_penalties(rollout: Rollout, overlong: OverlongPenalty) -> Tensor:
    """[B] by each row's number of policy tokens (DAPO, arXiv 2503.14476, eq. 13), at least 0.

    0 up to `max_tokens - buffer_tokens`; from there it rises linearly to `penalty` at `max_tokens`.
    """
    lengths = rollout.batch.loss_mask.sum(dim=1)
    over = lengths - (overlong.max_tokens - overlong.buffer_tokens)
    return overlong.penalty * (over / overlong.buffer_tokens).clamp(0.0, 1.0)


def less_at_the_end(rollout: Rollout, amounts: Tensor) -> Rollout:
    """The rollout with `amounts` [B] off each row's reward at its last trained token.

    Rows that are not scored keep theirs.
    """
    rewards = rollout.rewards.clone()
    rows = torch.arange(len(rewards))
    rewards[rows, rollout.last] -= amounts.masked_fill(~rollout.scored, 0.0).to(rewards.dtype)
    return replace(rollout, rewards=rewards)


def sampled_kl(rollout: Rollout, estimator: KlEstimator) -> Tensor:
    """[B, T] estimates of the KL of the policy that sampled against the reference; 0 where nothing
    is trained.

    Args:
        rollout: its batch has `old_log_probs` and `reference_log_probs`.
        estimator: which.
    """
    per_token, nothing = rollout.batch.per_token, rollout.batch.loss_mask == 0
    old = per_token["old_log_probs"].masked_fill(nothing, 0.0)
    reference = per_token["reference_log_probs"].masked_fill(nothing, 0.0)
    return estimate_kl(old, reference, estimator)


def mean_over_rows(values: Tensor, rollout: Rollout) -> float:
    """The mean, over scored rows, of `values` [B]; 0 where none is scored."""
    rows = values.double()[rollout.scored]
    return float(rows.mean()) if len(rows) else 0.0
