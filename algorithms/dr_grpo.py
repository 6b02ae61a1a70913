"""GRPO done right (Dr. GRPO, arXiv 2503.20783).

GRPO's division by an answer's own length lets long wrong answers off lightly, and its division by
the group's deviation weighs questions that are very easy or very hard more. Both are gone here: the
advantage is centred and no more, and the spec's aggregation divides by a constant.
"""

from algorithms.advantages.group import group_advantages
from algorithms.group_relative import GroupRelative, Rewards
from algorithms.losses.policy_gradient import TokenLoss
from algorithms.policy_gradient import TrainedTokens
from service.spec import DrGrpoSpec


class DrGrpo(GroupRelative[DrGrpoSpec]):
    """Centred rewards, clipped token ratio (section 3.2)."""

    def of_group(self, rewards: Rewards) -> Rewards:
        """r - mean(r)."""
        return group_advantages(rewards, normalize_by_std=False)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """PPO's clipped loss of each token."""
        return tokens.clipped(
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
        )
