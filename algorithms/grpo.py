"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

Several answers to one question are a group; an answer's advantage is its reward measured against
its own group, and no value model is needed. Where the references differ, docs/algorithms/
differences.md says which way this file goes.
"""

from algorithms.advantages.group import group_advantages
from algorithms.group_relative import GroupRelative, Rewards
from algorithms.losses.policy_gradient import TokenLoss
from algorithms.policy_gradient import TrainedTokens
from service.spec import GrpoSpec


class Grpo(GroupRelative[GrpoSpec]):
    """Group advantages, clipped token ratio, KL to a reference (eq. 3)."""

    def of_group(self, rewards: Rewards) -> Rewards:
        """Centred, and divided by the group's deviation unless the spec says otherwise."""
        return group_advantages(rewards, normalize_by_std=self._spec.normalize_by_std)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """PPO's clipped loss of each token."""
        return tokens.clipped(
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
            dual_clip=self._spec.dual_clip,
        )
