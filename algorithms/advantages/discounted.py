"""Sums over what comes later in a row, discounted."""

import torch
from torch import Tensor


def suffix_sums(values: Tensor, factors: Tensor) -> Tensor:
    """[B, T] float64: s_t = values_t + factors_t * s_(t+1), with s = 0 behind the last column.

    Args:
        values: [B, T], finite.
        factors: [B, T], finite.
    """
    # Token after token, each of all rows at once: as columns these lie side by side in memory.
    columns, weights = values.double().T.contiguous(), factors.double().T.contiguous()
    sums, later = torch.empty_like(columns), columns.new_zeros(len(values))
    for place in reversed(range(len(columns))):
        later = torch.addcmul(columns[place], weights[place], later, out=sums[place])
    return sums.T


def discounted_returns(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """[B, T] float64: G_t = r_t + discount * G_u, with u the policy's next token after t.

    Tokens that the policy did not write (what an environment said between two turns) take no step,
    and so no discount. 0 where nothing is trained.

    Args:
        rewards: [B, T]; read where the mask is not 0 and nowhere else, where it may be NaN.
        mask: [B, T], not 0 where the policy wrote the token.
        discount: gamma.
    """
    written = mask > 0
    kept = rewards.double().masked_fill(~written, 0.0)
    factors = torch.ones_like(kept).masked_fill(written, discount)
    return suffix_sums(kept, factors).masked_fill(~written, 0.0)


def of_next(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float64: at each place, `values` at the policy's next token after it; 0 where there
    is none.

    Args:
        values: [B, T]; read where the mask is not 0 and nowhere else.
        mask: [B, T], not 0 where the policy wrote the token.
    """
    written = mask > 0
    here_or_next = suffix_sums(values.masked_fill(~written, 0.0), (~written).double())
    return _later(here_or_next, 1)


def _later(values: Tensor, places: int) -> Tensor:
    """Each row moved to the front by so many places, filled up with 0."""
    return torch.nn.functional.pad(values[:, places:], (0, places))
