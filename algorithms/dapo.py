"""Decoupled clip and Dynamic sAmpling Policy Optimization (DAPO, arXiv 2503.14476).

GRPO with four changes, all of them in its spec: an upper bound of its own for the ratio
(`clip_high`), questions whose answers all earn the same are replaced (`dynamic_sampling`, which the
source of episodes does), every token of the step counts alike (`loss_aggregation: token-mean`), and
a penalty for answers near the bound of their length (`overlong`).
"""

from algorithms.advantages.group import group_advantages
from algorithms.group_relative import GroupRelative, Rewards
from algorithms.losses.policy_gradient import TokenLoss
from algorithms.policy_gradient import TrainedTokens
from service.spec import DapoSpec


class Dapo(GroupRelative[DapoSpec]):
    """Group advantages, ratio clipped at bounds of their own (eq. 8 to 10)."""

    def of_group(self, rewards: Rewards) -> Rewards:
        """(r - mean(r)) / std(r) (eq. 9)."""
        return group_advantages(rewards, normalize_by_std=True)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """The clipped loss of each token (eq. 10)."""
        return tokens.clipped(
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
        )
