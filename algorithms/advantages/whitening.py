"""Mean 0 and deviation 1 over all trained tokens of a batch."""

import math

from torch import Tensor

VARIANCE_EPSILON = 1e-8
"""Added to the variance. It is small beside any that rewards really have."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float64: (x - mean) / sqrt(variance + 1e-8), with the sample variance (n - 1).

    Both are over the tokens of the mask, of the whole batch: no row and no rank is whitened on its
    own. One token alone becomes 0.

    Args:
        values: [B, T]; where the mask is 0 they may be NaN.
        mask: [B, T], not 0 where the token is trained.

    Returns:
        0 where the mask is 0.
    """
    mean, variance = moments(values, mask)
    whitened = (values.double() - mean) / math.sqrt(variance + VARIANCE_EPSILON)
    return whitened.masked_fill(mask == 0, 0.0)


def moments(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and sample variance (n - 1) over the tokens of the mask.

    The mean of nothing is 0, and so is the variance of fewer than two.
    """
    kept = values.double()[mask > 0]
    mean = float(kept.mean()) if len(kept) else 0.0
    return mean, float(kept.var()) if len(kept) > 1 else 0.0
