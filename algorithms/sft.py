"""Supervised fine-tuning: cross-entropy on the tokens that the assistant wrote."""

from collections.abc import Sequence

from algorithms.batch import Batch, LossOutput, Normalizer, PolicyOutputs, masked_pair
from algorithms.losses.aggregation import aggregate
from service.spec import SftSpec


class Sft:
    """Maximum likelihood of the trained tokens; see `algorithms.algorithm.Algorithm`."""

    needs_reference = False
    needs_old_log_probs = False
    updates_per_rollout = 1

    def __init__(self, spec: SftSpec) -> None:
        self._spec = spec

    def advantages(self, rewards: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
        """Never asked for: there are no rewards.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"supervised fine-tuning has no advantages; got {len(rewards)} groups")

    def loss(self, outputs: PolicyOutputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """-log p(token) over trained tokens, aggregated with the step's own counts."""
        mask = batch.loss_mask
        loss = aggregate(-outputs.log_probs, mask, self._spec.loss_aggregation, normalizer)
        return LossOutput(loss=loss, sums={"entropy": masked_pair(outputs.entropy, mask)})
