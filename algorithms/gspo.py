"""Group Sequence Policy Optimization (GSPO, arXiv 2507.18071).

An answer is rewarded as a whole, so it has one importance ratio: the geometric mean of its tokens'
ratios. It is clipped as a whole, in a far narrower range than a token's.
"""

from algorithms.advantages.group import group_advantages
from algorithms.group_relative import GroupRelative, Rewards
from algorithms.losses.policy_gradient import TokenLoss, clipped_loss
from algorithms.losses.sequence_ratio import mean_log_ratio, with_token_gradients
from algorithms.policy_gradient import TrainedTokens
from service.spec import GspoSpec


class Gspo(GroupRelative[GspoSpec]):
    """Group advantages, clipped sequence ratio (eq. 5 to 7), or GSPO-token (eq. 13 and 14)."""

    def of_group(self, rewards: Rewards) -> Rewards:
        """Centred, and divided by the group's deviation unless the spec says otherwise (eq. 6)."""
        return group_advantages(rewards, normalize_by_std=self._spec.normalize_by_std)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """The sequence's clipped loss at each of its tokens: their mean is the sequence's."""
        log_ratio = mean_log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
        if self._spec.token_level:
            log_ratio = with_token_gradients(log_ratio, tokens.log_probs)
        return clipped_loss(
            log_ratio.expand_as(tokens.log_probs),
            tokens.advantages,
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
        )
