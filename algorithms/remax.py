"""ReMax (arXiv 2310.10505): REINFORCE against the reward of the greedy answer.

The greedy answer to the same question is a baseline that needs no critic and no group. It is
sampled by the source of episodes and never trained.
"""

from torch import Tensor

from algorithms.advantages.discounted import discounted_returns
from algorithms.algorithm import Credit
from algorithms.losses.policy_gradient import TokenLoss, weighted_log_prob_loss
from algorithms.policy_gradient import PolicyGradient, TrainedTokens
from algorithms.samples import Rollout
from service.spec import RemaxSpec


class Remax(PolicyGradient):
    """Rewards still to come, less the greedy answer's reward (eq. 4)."""

    def __init__(self, spec: RemaxSpec) -> None:
        super().__init__(spec)

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
        return Credit(advantages=advantages, metrics=_metrics(rollout.returns, baselines, scored))

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """-A log p of each token: the paper has no ratio."""
        return weighted_log_prob_loss(
            tokens.log_probs, tokens.old_log_probs, tokens.advantages, low=1.0, high=1.0
        )


def _metrics(returns: Tensor, baselines: Tensor, scored: Tensor) -> dict[str, float]:
    if not scored.any():
        return {}
    better = (returns > baselines)[scored]
    return {
        "baseline_mean": float(baselines[scored].mean()),
        "better_than_greedy": float(better.double().mean()),
    }
