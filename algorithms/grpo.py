"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

Several answers to one question are a group; an answer's advantage is its reward measured against
its own group, and no value model is needed. Where the references differ, docs/algorithms/
differences.md says which way this file goes.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from algorithms.advantages.group import group_advantages
from algorithms.batch import Batch, LossOutput, Normalizer, PolicyOutputs, masked_pair
from algorithms.losses.aggregation import aggregate
from algorithms.losses.divergence import k3
from algorithms.losses.policy_gradient import clipped_token_loss
from service.spec import GrpoSpec


class Grpo:
    """Group advantages, clipped token ratio, KL to a reference; see `Algorithm`.

    With one update a rollout the old policy is the current one, so its log-probs are the current
    ones without gradient, and no forward pass is spent on them.
    """

    def __init__(self, spec: GrpoSpec) -> None:
        self._spec = spec
        self.needs_reference = spec.kl_coef > 0
        self.needs_old_log_probs = spec.updates_per_rollout > 1
        self.updates_per_rollout = spec.updates_per_rollout

    def advantages(self, rewards: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
        """Each group on its own; see `group_advantages`."""
        by_std = self._spec.normalize_by_std
        return [group_advantages(group, normalize_by_std=by_std) for group in rewards]

    def loss(self, outputs: PolicyOutputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """Clipped surrogate plus `kl_coef` times k3, aggregated (eq. 3)."""
        spec, mask = self._spec, batch.loss_mask
        # What is masked must not reach exp(): 0 * inf in its gradient would be NaN.
        log_probs = outputs.log_probs.masked_fill(mask == 0, 0.0)
        old = batch.per_token.get("old_log_probs", log_probs.detach()).masked_fill(mask == 0, 0.0)
        tokens = clipped_token_loss(
            log_probs,
            old,
            batch.per_sequence["advantages"].unsqueeze(1),
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
        )
        token_loss = tokens.loss
        sums = {
            "entropy": masked_pair(outputs.entropy, mask),
            "ratio_clip_fraction": masked_pair(tokens.clipped, mask),
            "ratio_deviation": largest_per_sequence((tokens.ratio - 1.0).abs(), mask),
            "approx_kl": masked_pair(k3(old, log_probs.detach()), mask),
        }
        if self.needs_reference:
            kl = k3(log_probs, batch.per_token["reference_log_probs"].masked_fill(mask == 0, 0.0))
            token_loss = token_loss + spec.kl_coef * kl
            sums["kl"] = masked_pair(kl, mask)
        sums |= rollout_mismatch(old, batch)
        loss = aggregate(token_loss, mask, spec.loss_aggregation, normalizer)
        return LossOutput(loss=loss, sums=sums)


def rollout_mismatch(old_log_probs: Tensor, batch: Batch) -> Mapping[str, tuple[float, float]]:
    """How far the trainer's log-probs, before any update, are from the generator's.

    Both should be 0 but for rounding. Anything else means that trainer and generator do not
    compute the same function: dropout, a shifted position, a temperature, stale weights.
    """
    if "rollout_log_probs" not in batch.per_token:
        return {}
    mask = batch.loss_mask
    rollout = batch.per_token["rollout_log_probs"].masked_fill(mask == 0, 0.0)
    deviation = ((old_log_probs - rollout).exp() - 1.0).abs()
    return {
        "rollout_kl": masked_pair(k3(rollout, old_log_probs), mask),
        "rollout_ratio_deviation": largest_per_sequence(deviation, mask),
    }


def largest_per_sequence(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """(sum over sequences of the largest value in each, number of sequences that are trained).

    A maximum over a whole batch cannot be summed over micro-batches; this can.
    """
    largest = values.detach().masked_fill(mask == 0, 0.0).amax(dim=1)
    return float(largest.sum()), float((mask.sum(dim=1) > 0).sum())
