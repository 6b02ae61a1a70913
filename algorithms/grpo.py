"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

Several answers to one question are a group; an answer's advantage is its reward measured against
its own group, and no value model is needed. Where the references differ, docs/algorithms/
differences.md says which way this file goes.
"""

from functools import partial

from algorithms.advantages.group import group_advantages
from algorithms.algorithm import Credit
from algorithms.losses.policy_gradient import TokenLoss, clipped_token_loss
from algorithms.policy_gradient import PolicyGradient, TrainedTokens, broadcast, by_group
from algorithms.samples import Rollout
from service.spec import GrpoSpec


class Grpo(PolicyGradient):
    """Group advantages, clipped token ratio, KL to a reference (eq. 3)."""

    def __init__(self, spec: GrpoSpec) -> None:
        super().__init__(spec)
        self._own = spec

    def credit(self, rollout: Rollout) -> Credit:
        """Each group on its own; see `group_advantages`."""
        of_group = partial(group_advantages, normalize_by_std=self._own.normalize_by_std)
        return Credit(advantages=broadcast(by_group(rollout, of_group), rollout))

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """PPO's clipped loss of each token."""
        return clipped_token_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            clip_low=self._own.clip_low,
            clip_high=self._own.clip_high,
            dual_clip=self._own.dual_clip,
        )
