"""An answer's reward measured against the other answers to the same question."""

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6
"""Added to the standard deviation. It is small beside any spread that rewards really have."""

ROUNDING = 1e-6
"""Rewards that differ by less, relative to a mean above 1, are the same: a sum of float32 rewards
of several turns is rounded by about 1e-7 of its terms."""


def has_spread(rewards: Sequence[float | None]) -> bool:
    """Whether the scored answers to one question differ: where none does, nothing can be learned
    from a comparison."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return False
    mean = math.fsum(scored) / len(scored)
    return max(scored) - min(scored) > ROUNDING * max(1.0, abs(mean))


def group_advantages(
    rewards: Sequence[float | None], *, normalize_by_std: bool
) -> list[float | None]:
    """(r - mean) / (std + 1e-6) over one group (arXiv 2402.03300, section 4.1.2).

    std is the sample standard deviation (n - 1), over the group and never over the batch. Rewards
    of None, which could not be scored, take no part and get None: they are not 0. Equal rewards
    give exactly 0, however they were rounded; so does a group with one scored answer.

    Args:
        rewards: of the answers to one question.
        normalize_by_std: False leaves out the division (Dr. GRPO, arXiv 2503.20783).
    """
    # 0.1 + 0.2 and 0.3 are the same reward; dividing their difference by itself would make it +-1.
    if not has_spread(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    scored = [reward for reward in rewards if reward is not None]
    mean = math.fsum(scored) / len(scored)
    scale = 1.0
    if normalize_by_std:
        variance = math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1)
        scale = math.sqrt(variance) + STD_EPSILON
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
