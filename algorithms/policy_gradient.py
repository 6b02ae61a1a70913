"""What every policy-gradient algorithm does around its own advantage and its own ratio.

On the driver, rewards are shaped (KL, length) before an algorithm gives its advantages. On a rank,
its token losses are weighed by how likely the generator was to sample what is trained, a KL term
and an entropy term are added, and all is aggregated. What is left to an algorithm's file is
`credit` and `surrogate`.

With one optimizer step a rollout the old policy is the current one, so its log-probs are the
current ones without gradient, and no forward pass is spent on them.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Credit
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.losses.aggregation import aggregate
from algorithms.losses.divergence import estimate_kl
from algorithms.losses.mismatch import correction_weights, rollout_mismatch
from algorithms.losses.policy_gradient import TokenLoss, largest_per_sequence
from algorithms.samples import Rollout
from service.spec import OverlongPenalty, PolicyGradientSpec


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


class PolicyGradient(Algorithm):
    """An algorithm that learns from rewards; see the module's text."""

    def __init__(self, spec: PolicyGradientSpec) -> None:
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
        """Weight of the KL estimate now."""
        return self._spec.kl_coef

    def advantages(self, rollout: Rollout) -> Credit:
        """Shapes the rewards, and gives the algorithm's own advantages."""
        metrics: dict[str, float] = {}
        if self._spec.overlong is not None:
            rollout = with_length_penalty(rollout, self._spec.overlong)
        if self._spec.keeps_reference and self._spec.kl_in == "reward":
            kl = sampled_kl(rollout, self._spec)
            metrics = {"reward_kl": mean_over_rows(kl, rollout), "kl_coef": self.kl_coef}
            rollout = replace(rollout, rewards=rollout.rewards - self.kl_coef * kl)
        credit = self.credit(rollout)
        return replace(credit, metrics={**metrics, **credit.metrics})

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


def with_length_penalty(rollout: Rollout, overlong: OverlongPenalty) -> Rollout:
    """Takes from each row's last reward by its number of policy tokens (arXiv 2503.14476, eq. 13).

    0 up to `max_tokens - buffer_tokens`; from there it falls linearly to -penalty at `max_tokens`.
    """
    lengths = rollout.batch.loss_mask.sum(dim=1)
    over = lengths - (overlong.max_tokens - overlong.buffer_tokens)
    share = (over / overlong.buffer_tokens).clamp(0.0, 1.0)
    rewards = rollout.rewards.clone()
    rewards[torch.arange(len(rewards)), rollout.last] -= overlong.penalty * share
    return replace(rollout, rewards=rewards)


def sampled_kl(rollout: Rollout, spec: PolicyGradientSpec) -> Tensor:
    """[B, T] estimates of the KL of the policy that sampled against the reference; 0 where nothing
    is trained."""
    per_token, nothing = rollout.batch.per_token, rollout.batch.loss_mask == 0
    old = per_token["old_log_probs"].masked_fill(nothing, 0.0)
    reference = per_token["reference_log_probs"].masked_fill(nothing, 0.0)
    return estimate_kl(old, reference, spec.kl_estimator)


def mean_over_rows(values: Tensor, rollout: Rollout) -> float:
    """The mean, over scored rows, of the sum of a row's values; 0 where none is scored."""
    rows = values.double().sum(dim=1)[rollout.scored]
    return float(rows.mean()) if len(rows) else 0.0


def by_group(
    rollout: Rollout,
    advantages: Callable[[Sequence[float | None]], Sequence[float | None]],
) -> Tensor:
    """[B] advantages of whole rows, each group on its own.

    Args:
        rollout: groups of `group_size` rows.
        advantages: from the returns of one group, None for a row that was not scored, to advantages
            of the same rows; what becomes of None does not matter.
    """
    pairs = zip(rollout.returns.tolist(), rollout.scored.tolist(), strict=True)
    returns = [value if scored else None for value, scored in pairs]
    size = rollout.group_size
    groups = [returns[start : start + size] for start in range(0, len(returns), size)]
    flat = [value or 0.0 for group in groups for value in advantages(group)]
    return torch.tensor(flat, dtype=torch.float64)


def broadcast(advantages: Tensor, rollout: Rollout) -> Tensor:
    """[B, T]: each row's advantage at each of its tokens."""
    return advantages.unsqueeze(1).expand(-1, rollout.batch.tokens.shape[1])
