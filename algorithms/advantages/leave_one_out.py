"""An answer's reward against the mean of the other answers to the same question."""

import math
from collections.abc import Sequence

from algorithms.advantages.group import has_spread


def leave_one_out_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """r_i - mean of the others (RLOO, arXiv 2402.14740, after Kool et al., 2019), an unbiased
    baseline.

    Rewards of None, which could not be scored, take no part and get None. A scored answer without
    another has no baseline, and its advantage is 0.

    Args:
        rewards: of the answers to one question.
    """
    if not has_spread(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    scored = [reward for reward in rewards if reward is not None]
    total, others = math.fsum(scored), len(scored) - 1
    return [None if reward is None else reward - (total - reward) / others for reward in rewards]
