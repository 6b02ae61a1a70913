"""Supervised fine-tuning: cross-entropy on the tokens that the assistant wrote."""

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.losses.aggregation import aggregate
from service.spec import SftSpec


class Sft(Algorithm):
    """Maximum likelihood of the trained tokens."""

    def __init__(self, spec: SftSpec) -> None:
        self._spec = spec

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """-log p(token) over trained tokens, aggregated with the step's own counts."""
        said, mask = policy_outputs(outputs), batch.loss_mask
        loss = aggregate(-said.log_probs, mask, self._spec.loss_aggregation, normalizer)
        return LossOutput(loss=loss, sums={"entropy": masked_pair(said.entropy, mask)})
