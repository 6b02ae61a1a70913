"""What every policy-gradient algorithm does around its own advantage and its own ratio.

On the driver, rewards are shaped (KL, length) before an algorithm gives its advantages. On a rank,
its token losses are weighed by how likely the generator was to sample what is trained, a KL term
and an entropy term are added, and all is aggregated. What is left to an algorithm's file is
`credit` and `surrogate`.

With one optimizer step a rollout the old policy is the current one, so its log-probs are the
current ones without gradient, and no forward pass is spent on them.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from algorithms.advantages.shaping import (
    length_penalties,
    less_at_the_end,
    mean_over_rows,
    sampled_kl,
)
from algorithms.algorithm import Algorithm, Credit
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.losses.aggregation import aggregate
from algorithms.losses.divergence import estimate_kl
from algorithms.losses.mismatch import correction_weights, rollout_mismatch
from algorithms.losses.policy_gradient import TokenLoss, clipped_loss, largest_per_sequence
from algorithms.samples import Rollout
from service.spec import PolicyGradientSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The tensors that a surrogate loss reads, [B, T] each, finite where nothing is trained.

    Attributes:
        log_probs: of the policy, with gradient.
        old_log_probs: of the policy that sampled, by the trainer's own model.
        advantages: of each token.
        mask: 1 where the token is trained.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def of(cls, log_probs: Tensor, batch: Batch) -> "TrainedTokens":
        """Masked, since what is masked must not reach exp(): 0 * inf would be NaN."""
        nothing = batch.loss_mask == 0
        log_probs = log_probs.masked_fill(nothing, 0.0)
        old = batch.per_token.get("old_log_probs", log_probs.detach())
        return cls(
            log_probs=log_probs,
            old_log_probs=old.masked_fill(nothing, 0.0),
            advantages=batch.per_token["advantages"].masked_fill(nothing, 0.0),
            mask=batch.loss_mask,
        )

    def clipped(
        self, *, clip_low: float, clip_high: float, dual_clip: float | None = None
    ) -> TokenLoss:
        """PPO's clipped loss by each token's own ratio; see `clipped_loss`."""
        return clipped_loss(
            self.log_probs - self.old_log_probs,
            self.advantages,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )


class PolicyGradient[Spec: PolicyGradientSpec](Algorithm):
    """An algorithm that learns from rewards, with its own kind of spec; see the module's text."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.updates_per_rollout = spec.updates_per_rollout
        self.mini_batches = spec.mini_batches
        many = spec.updates_per_rollout * spec.mini_batches > 1
        self.needs_old_log_probs = many or (spec.kl_coef > 0 and spec.kl_in == "reward")

    @abstractmethod
    def credit(self, rollout: Rollout) -> Credit:
        """Advantages from shaped rewards; see `Algorithm.advantages`."""

    @abstractmethod
    def surrogate(self, tokens: TrainedTokens) -> TokenLoss:
        """The loss of each token, to be minimised."""

    @property
    def kl_coef(self) -> float:
        """Weight of the KL estimate in the reward now."""
        return self._spec.kl_coef

    def saw_kl(self, kl: float, answers: int) -> None:
        """Told once a rollout, after its rewards were shaped: the mean KL of so many answers."""

    def advantages(self, rollout: Rollout) -> Credit:
        """Shapes the rewards, and gives the algorithm's own advantages."""
        rollout, metrics = self._shaped(rollout)
        credit = self.credit(rollout)
        return replace(credit, metrics={**metrics, **credit.metrics})

    def _shaped(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Rewards less the length's penalty and the KL, and what these are."""
        spec, metrics = self._spec, dict[str, float]()
        if spec.overlong is not None:
            penalties = length_penalties(rollout, spec.overlong)
            metrics["length_penalty"] = mean_over_rows(penalties, rollout)
            rollout = less_at_the_end(rollout, penalties)
        if spec.keeps_reference and spec.kl_in == "reward":
            kl = sampled_kl(rollout, spec.kl_estimator)
            mean = mean_over_rows(kl.double().sum(dim=1), rollout)
            metrics |= {"reward_kl": mean, "kl_coef": self.kl_coef}
            rollout = replace(rollout, rewards=rollout.rewards - self.kl_coef * kl)
            self.saw_kl(mean, int(rollout.scored.sum()))
        return rollout, metrics

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """The surrogate, weighed, with KL and entropy; aggregated."""
        spec, said = self._spec, policy_outputs(outputs)
        tokens = TrainedTokens.of(said.log_probs, batch)
        mask, surrogate = tokens.mask, self.surrogate(tokens)
        token_loss, sums = surrogate.loss, _metrics(said.entropy, tokens, surrogate)
        sums |= rollout_mismatch(tokens.old_log_probs, batch)
        if spec.rollout_correction is not None:
            weights = correction_weights(tokens.old_log_probs, batch, spec.rollout_correction)
            token_loss = token_loss * weights
            sums["rollout_weight"] = masked_pair(weights, mask)
        if spec.keeps_reference and spec.kl_in == "loss":
            reference = batch.per_token["reference_log_probs"].masked_fill(mask == 0, 0.0)
            kl = estimate_kl(tokens.log_probs, reference, spec.kl_estimator)
            token_loss = token_loss + spec.kl_coef * kl
            sums["kl"] = masked_pair(kl, mask)
        if spec.entropy_coef:
            token_loss = token_loss - spec.entropy_coef * said.entropy
        loss = aggregate(
            token_loss,
            mask,
            spec.loss_aggregation,
            normalizer,
            length_constant=spec.length_constant or 1,
        )
        return LossOutput(loss=loss, sums=sums)


def _metrics(
    entropy: Tensor, tokens: TrainedTokens, surrogate: TokenLoss
) -> dict[str, tuple[float, float]]:
    mask, log_probs = tokens.mask, tokens.log_probs.detach()
    return {
        "entropy": masked_pair(entropy, mask),
        "ratio_clip_fraction": masked_pair(surrogate.clipped, mask),
        "ratio_deviation": largest_per_sequence((surrogate.ratio - 1.0).abs(), mask),
        "approx_kl": masked_pair(estimate_kl(tokens.old_log_probs, log_probs, "k3"), mask),
    }
