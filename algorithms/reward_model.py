"""A reward model from preferences (Bradley and Terry, 1952; arXiv 2203.02155, eq. 1).

The model's head gives one number, read at an answer's last token. That of the chosen answer is to
be above that of the rejected one; only the difference matters, so a constant may be added to all.
"""

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, value_outputs
from algorithms.losses.preference import bradley_terry_loss
from algorithms.pairs import mean_over_pairs, reward_metrics, whole_pairs
from service.spec import RewardModelSpec


class RewardModel(Algorithm):
    """The likelihood that the chosen answer is the better one."""

    def __init__(self, spec: RewardModelSpec) -> None:
        self._spec = spec

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """-log sigmoid(chosen - rejected - margin), a mean over pairs.

        `per_sequence["margin"]`, where it is there, counts on the chosen row.
        """
        scores = value_outputs(outputs).scores
        chosen, rejected = whole_pairs(scores.double(), batch)
        margins = batch.per_sequence.get("margin") if self._spec.margins else None
        losses = bradley_terry_loss(
            chosen,
            rejected,
            margins=None if margins is None else whole_pairs(margins.double(), batch)[0],
            center_coef=self._spec.center_coef,
        )
        loss = mean_over_pairs(losses, normalizer, scores.dtype)
        return LossOutput(loss=loss, sums=reward_metrics(chosen, rejected, batch))
