"""What a critic learns."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of each token, the larger of two where values are clipped.

        near = V_old + clip(V - V_old, -clip, clip)
        loss = 0.5 max((V - R)^2, (near - R)^2)          (arXiv 2005.12729, section 3)

    A value may move so far from its old one in one batch; beyond that there is no gradient, unless
    that would bring it back.

    Args:
        values: [B, T] of the critic, with gradient; finite everywhere.
        old_values: [B, T] of the critic before the batch's first update.
        returns: [B, T], the targets.
        clip: how far; None sets no bound.

    Returns:
        The loss [B, T] with gradient; and [B, T], 1.0 where the bound is what counts.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(error)
    change = values - old_values
    bounded = (old_values + change.clamp(-clip, clip) - returns).square()
    clipped = (change.abs() > clip) & (bounded > error)
    return 0.5 * torch.where(clipped, bounded, error), clipped.float()
