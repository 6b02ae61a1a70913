"""REINFORCE++ and REINFORCE++-baseline (arXiv 2501.03262).

No critic: a token is worth what is earned from it on, and advantages are normalised over the whole
batch, not within a question's answers. So one answer a question is enough; with a group, its mean
can be taken off first.
"""

import math

from algorithms.advantages.discounted import discounted_returns
from algorithms.advantages.shaping import less_at_the_end
from algorithms.advantages.whitening import whiten
from algorithms.algorithm import Credit
from algorithms.group_relative import Rewards, by_group, group_metrics
from algorithms.losses.policy_gradient import TokenLoss
from algorithms.policy_gradient import PolicyGradient, TrainedTokens
from algorithms.samples import Rollout
from service.spec import ReinforcePlusPlusSpec


class ReinforcePlusPlus(PolicyGradient[ReinforcePlusPlusSpec]):
    """Discounted returns, normalised over the batch; clipped token ratio."""

    def credit(self, rollout: Rollout) -> Credit:
        """G_t = the discounted sum of rewards from token t on, whitened over all trained tokens."""
        metrics = group_metrics(rollout) if rollout.group_size > 1 else {}
        if self._spec.baseline == "group":
            rollout = less_at_the_end(rollout, by_group(rollout, mean_for_each))
        mask = rollout.batch.loss_mask
        returns = discounted_returns(rollout.rewards, mask, self._spec.discount)
        return Credit(advantages=whiten(returns, mask), metrics=metrics)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """PPO's clipped loss of each token."""
        return tokens.clipped(
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
        )


def mean_for_each(rewards: Rewards) -> Rewards:
    """The mean of the scored rewards of one group, for each of its answers."""
    scored = [reward for reward in rewards if reward is not None]
    return [math.fsum(scored) / len(scored) if scored else None] * len(rewards)
