"""REINFORCE Leave-One-Out (RLOO, arXiv 2402.14740).

The baseline of an answer is the mean reward of the other answers to its question. An answer is one
action: it has one log-prob, the sum of its tokens', and so one importance ratio.
"""

from dataclasses import replace

from torch import Tensor

from algorithms.advantages.leave_one_out import leave_one_out_advantages
from algorithms.group_relative import GroupRelative, Rewards
from algorithms.losses.policy_gradient import TokenLoss, clipped_loss
from algorithms.losses.sequence_ratio import sequence_log_ratio, share_of_each_token
from algorithms.policy_gradient import TrainedTokens
from service.spec import RlooSpec


class Rloo(GroupRelative[RlooSpec]):
    """Leave-one-out advantages, clipped ratio of an answer or of each token."""

    def of_group(self, rewards: Rewards) -> Rewards:
        """r_i - mean of the others; with `kl_in: reward` the KL is in r, so in the baseline too."""
        return leave_one_out_advantages(rewards)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """The clipped loss of each token, or equal shares in the one of its answer."""
        if self._spec.ratio == "token":
            return self._clipped(tokens.log_probs - tokens.old_log_probs, tokens)
        log_ratio = sequence_log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
        whole = self._clipped(log_ratio.expand_as(tokens.log_probs), tokens)
        return replace(whole, loss=share_of_each_token(whole.loss, tokens.mask))

    def _clipped(self, log_ratio: Tensor, tokens: TrainedTokens) -> TokenLoss:
        return clipped_loss(
            log_ratio,
            tokens.advantages,
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
        )
