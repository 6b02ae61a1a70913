"""ReMax (arXiv 2310.10505): REINFORCE against the reward of the greedy answer.

The greedy answer to the same question is a baseline that needs no critic and no group. It is
sampled by the source of episodes and never trained.
"""

from algorithms.advantages.discounted import discounted_returns
from algorithms.algorithm import Credit
from algorithms.losses.policy_gradient import TokenLoss, reinforce_loss
from algorithms.policy_gradient import PolicyGradient, TrainedTokens
from algorithms.samples import Rollout
from service.spec import RemaxSpec


class Remax(PolicyGradient[RemaxSpec]):
    """Rewards still to come, less the greedy answer's reward (eq. 4)."""

    def credit(self, rollout: Rollout) -> Credit:
        """G_t - b, with G_t the sum of rewards from token t on.

        Raises:
            ValueError: the rollout has no baselines.
        """
        if rollout.baselines is None:
            raise ValueError("ReMax needs the rewards of greedy answers, and the rollout has none")
        mask, baselines = rollout.batch.loss_mask, rollout.baselines.double()
        scored = rollout.scored & baselines.isfinite()
        returns = discounted_returns(rollout.rewards, mask, discount=1.0)
        advantages = (returns - baselines.unsqueeze(1)).masked_fill(~scored.unsqueeze(1), 0.0)
        better = (rollout.returns > baselines)[scored].double()
        metrics = {"better_than_greedy": float(better.mean())} if len(better) else {}
        return Credit(advantages=advantages, metrics=metrics)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """-A log p of each token: the paper has no ratio."""
        return reinforce_loss(tokens.log_probs, tokens.old_log_probs, tokens.advantages)
