"""Generalised advantage estimation over the tokens that the policy wrote."""

import torch
from torch import Tensor

from algorithms.advantages.discounted import of_next, suffix_sums
from algorithms.advantages.whitening import moments


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and a critic's targets (arXiv 1506.02438, eq. 16).

        d_t = r_t + discount * V_u - V_t
        A_t = d_t + discount * gae_lambda * A_u
        R_t = A_t + V_t

    u is the policy's next token after t. What an environment said in between is skipped: it is no
    step, and what a critic says there is never read. V_t is the value of the state before token t.
    Behind the last token V is 0, also where the episode was cut: a bound on length or turns is part
    of the task, and a cut answer is worth what it earned.

    Args:
        rewards: [B, T]; where the mask is 0 they may be NaN.
        values: [B, T] of the critic before the update; where the mask is 0 they may be NaN.
        mask: [B, T], not 0 where the policy wrote the token.
        discount: gamma.
        gae_lambda: lambda.

    Returns:
        Advantages and returns, [B, T] float64, 0 where the mask is 0.
    """
    written = mask > 0
    rewards = rewards.double().masked_fill(~written, 0.0)
    values = values.double().masked_fill(~written, 0.0)
    errors = (rewards + discount * of_next(values, mask) - values).masked_fill(~written, 0.0)
    factors = torch.ones_like(errors).masked_fill(written, discount * gae_lambda)
    advantages = suffix_sums(errors, factors).masked_fill(~written, 0.0)
    return advantages, advantages + values


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over the tokens of the mask.

    1 is a perfect critic, 0 one that is as good as a constant, and below 0 one that is worse.

    Returns:
        None where the returns do not vary.
    """
    _, spread = moments(returns, mask)
    _, left = moments(returns - values.double().masked_fill(mask == 0, 0.0), mask)
    return 1.0 - left / spread if spread > 1e-12 else None
