"""One importance ratio for a whole sequence."""

import torch
from torch import Tensor


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]: log p(answer) - log p_old(answer), the sum over a row's trained tokens.

    Args:
        log_probs: [B, T] of the policy, with gradient; finite everywhere.
        old_log_probs: [B, T] of the policy that sampled; finite everywhere.
        mask: [B, T], not 0 where the token is trained.
    """
    difference = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0)
    return difference.sum(dim=1, keepdim=True)


def mean_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]: `sequence_log_ratio` divided by the row's number of trained tokens.

    Its exp is GSPO's ratio (arXiv 2507.18071, eq. 7): the geometric mean of the tokens' ratios,
    whose size does not depend on an answer's length.
    """
    counts = (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    return sequence_log_ratio(log_probs, old_log_probs, mask) / counts


def with_token_gradients(log_ratio: Tensor, log_probs: Tensor) -> Tensor:
    """[B, T]: the value of a sequence's ratio at each token, with the token's own gradient.

    sg[log s] + log p(t) - sg[log p(t)], whose exp is GSPO-token's ratio (arXiv 2507.18071, eq. 14);
    sg takes the gradient off.

    Args:
        log_ratio: [B, 1].
        log_probs: [B, T] of the policy, with gradient.
    """
    # The difference is 0, exactly, and carries the gradient.
    return log_ratio.detach() + (log_probs - log_probs.detach())


def share_of_each_token(losses: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: a sequence's one loss in equal parts at its trained tokens, which add up to it.

    Args:
        losses: [B, 1] or [B, T], the same along a row.
        mask: [B, T], not 0 where the token is trained.
    """
    counts = (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask != 0, losses / counts, 0.0)
