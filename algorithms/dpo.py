"""Direct Preference Optimization (arXiv 2305.18290) and its relatives.

The policy is its own reward model: the reward of an answer is beta times the log-ratio of policy
to reference (eq. 5; the term that depends on the prompt alone falls out of a difference). All
members of the family take the two rewards apart; they differ in how much a difference is worth.
Where the references differ, docs/algorithms/differences.md says which way this file goes.
"""

from torch import Tensor

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.losses.preference import (
    hinge_loss,
    ipo_loss,
    robust_loss,
    sequence_log_probs,
    sigmoid_loss,
)
from algorithms.pairs import all_of, mean_over_pairs, reward_metrics, whole_pairs
from service.spec import DpoSpec


class Dpo(Algorithm):
    """A loss on the difference of two log-ratios, and the chosen answer's likelihood beside it."""

    def __init__(self, spec: DpoSpec) -> None:
        self._spec = spec

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """The named loss, a mean over pairs; `batch` has `reference_log_probs`."""
        spec, said, mask = self._spec, policy_outputs(outputs), batch.loss_mask
        mean = spec.length_normalized
        # Token by token first: the log-ratio of an answer is small where its log-prob is large.
        log_ratios = said.log_probs - batch.per_token["reference_log_probs"]
        chosen, rejected = whole_pairs(sequence_log_probs(log_ratios, mask, mean=mean), batch)
        log_probs = whole_pairs(sequence_log_probs(said.log_probs, mask, mean=mean), batch)
        nll = -whole_pairs(sequence_log_probs(said.log_probs, mask, mean=True), batch)[0]
        losses = self._preference(chosen - rejected)
        if spec.nll_coef:
            losses = losses + spec.nll_coef * nll
        return LossOutput(
            loss=mean_over_pairs(losses, normalizer, said.log_probs.dtype),
            sums={
                **reward_metrics(spec.beta * chosen, spec.beta * rejected, batch),
                "log_prob_chosen": all_of(log_probs[0]),
                "log_prob_rejected": all_of(log_probs[1]),
                "nll": all_of(nll),
                "entropy": masked_pair(said.entropy, mask),
            },
        )

    def _preference(self, differences: Tensor) -> Tensor:
        """[P] losses of differences of log-ratios."""
        spec, margins = self._spec, self._spec.beta * differences
        if spec.loss == "ipo":
            return ipo_loss(differences, beta=spec.beta)
        if spec.loss == "hinge":
            return hinge_loss(margins)
        if spec.loss == "robust":
            return robust_loss(margins, label_smoothing=spec.label_smoothing)
        return sigmoid_loss(margins, label_smoothing=spec.label_smoothing)
