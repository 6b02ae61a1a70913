"""Proximal Policy Optimization (PPO, arXiv 1707.06347) with a critic and a KL reward (arXiv
2203.02155).

A critic, trained beside the policy, says what each state is worth; a token's advantage is how much
better it went than that (GAE). The KL against the model as the job started is taken off each
token's reward, with a weight that is fixed or follows the KL.
"""

from collections.abc import Mapping
from typing import Any

from algorithms.advantages.discounted import discounted_returns
from algorithms.advantages.gae import explained_variance, generalized_advantages
from algorithms.advantages.whitening import moments, whiten
from algorithms.algorithm import Credit
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, value_outputs
from algorithms.losses.aggregation import aggregate
from algorithms.losses.policy_gradient import TokenLoss
from algorithms.losses.value import value_loss
from algorithms.policy_gradient import PolicyGradient, TrainedTokens
from algorithms.samples import Rollout
from service.spec import AdaptiveKl, PpoSpec


class Ppo(PolicyGradient[PpoSpec]):
    """Generalised advantages, clipped token ratio (eq. 7), clipped value loss."""

    def __init__(self, spec: PpoSpec) -> None:
        super().__init__(spec)
        self._kl_coef = spec.kl_coef

    def credit(self, rollout: Rollout) -> Credit:
        """GAE with the critic's values from before the update, whitened if the spec says so."""
        spec, mask = self._spec, rollout.batch.loss_mask
        values = rollout.batch.per_token["values"]
        advantages, returns = generalized_advantages(
            rollout.rewards, values, mask, discount=spec.discount, gae_lambda=spec.gae_lambda
        )
        # Against what was earned, and not against `returns`, which are made of the values too.
        earned = discounted_returns(rollout.rewards, mask, spec.discount)
        explained = explained_variance(values, earned, mask)
        metrics = {"value_mean": moments(values, mask)[0], "return_mean": moments(earned, mask)[0]}
        if explained is not None:
            metrics["explained_variance"] = explained
        if spec.whiten_advantages:
            advantages = whiten(advantages, mask)
        return Credit(advantages=advantages, returns=returns, metrics=metrics)

    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """PPO's clipped loss of each token."""
        return tokens.clipped(
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
            dual_clip=self._spec.dual_clip,
        )

    def value_loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """The critic's loss, a mean over the step's trained tokens."""
        mask, said = batch.loss_mask, value_outputs(outputs)
        values, old, returns = (
            tensor.masked_fill(mask == 0, 0.0)
            for tensor in (said.values, batch.per_token["values"], batch.per_token["returns"])
        )
        losses, clipped = value_loss(values, old, returns, clip=self._spec.value_clip)
        loss = aggregate(losses, mask, "token-mean", normalizer)
        return LossOutput(loss=loss, sums={"value_clip_fraction": masked_pair(clipped, mask)})

    @property
    def kl_coef(self) -> float:
        """Weight of the KL estimate in the reward now; the controller may have moved it."""
        return self._kl_coef

    def saw_kl(self, kl: float, answers: int) -> None:
        """Moves the weight of the next rollout's KL."""
        if isinstance(self._spec.kl_controller, AdaptiveKl):
            self._kl_coef = adapted(self._kl_coef, kl, answers, self._spec.kl_controller)

    def state(self) -> dict[str, Any]:
        """The weight of the KL, where it moves."""
        adaptive = isinstance(self._spec.kl_controller, AdaptiveKl)
        return {"kl_coef": self._kl_coef} if adaptive else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """A job that goes on with a fixed weight takes its spec's."""
        adaptive = isinstance(self._spec.kl_controller, AdaptiveKl)
        kept = float(state.get("kl_coef", self._spec.kl_coef))
        self._kl_coef = kept if adaptive else self._spec.kl_coef


def adapted(coefficient: float, kl: float, answers: int, controller: AdaptiveKl) -> float:
    """The next weight (arXiv 1909.08593, section 2.2), by how far the KL is from its target.

        error = clip(kl / target - 1, -0.2, 0.2)
        next  = coefficient (1 + error answers / horizon)

    More answers than the horizon count as the horizon: the weight stays above 0.

    Args:
        coefficient: the weight under which the answers were sampled.
        kl: their mean, in nats of a whole answer.
        answers: how many.
        controller: target and horizon.
    """
    error = min(max(kl / controller.target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(answers / controller.horizon, 1.0))
