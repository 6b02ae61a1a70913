"""Clipped Importance-Sampling Policy Optimization (CISPO; MiniMax-M1, arXiv 2506.13585).

PPO's clip drops the gradient of a token whose ratio has left the range, and rare tokens that start
a new line of thought leave it first. Here the ratio is a weight without gradient: the weight is
bounded, and every token keeps its gradient.
"""

from algorithms.advantages.group import group_advantages
from algorithms.group_relative import GroupRelative, Rewards
from algorithms.losses.policy_gradient import TokenLoss, weighted_log_prob_loss
from algorithms.policy_gradient import TrainedTokens
from service.spec import CispoSpec


class Cispo(GroupRelative[CispoSpec]):
    """Group advantages, log-probs weighed by a bounded ratio (eq. 4 and 5)."""

    def of_group(self, rewards: Rewards) -> Rewards:
        """Centred, and divided by the group's deviation unless the spec says otherwise."""
        return group_advantages(rewards, normalize_by_std=self._spec.normalize_by_std)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """-w A log p of each token."""
        return weighted_log_prob_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            low=1.0 - self._spec.clip_low,
            high=1.0 + self._spec.clip_high,
        )
