"""Simple Preference Optimization (arXiv 2405.14734).

The reward of an answer is the mean log-prob of its tokens, scaled: what a model samples by, so no
reference is needed, and long answers have no advantage. A chosen answer's reward is to be above the
rejected one's by a margin.
"""

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.losses.preference import sequence_log_probs, simpo_loss
from algorithms.pairs import all_of, mean_over_pairs, reward_metrics, whole_pairs
from service.spec import SimpoSpec


class Simpo(Algorithm):
    """A loss on the difference of two mean log-probs."""

    def __init__(self, spec: SimpoSpec) -> None:
        self._spec = spec

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """-log sigmoid(beta (chosen - rejected) - gamma), a mean over pairs (eq. 6)."""
        spec, said, mask = self._spec, policy_outputs(outputs), batch.loss_mask
        means = sequence_log_probs(said.log_probs, mask, mean=True)
        chosen, rejected = whole_pairs(means, batch)
        losses = simpo_loss(chosen - rejected, beta=spec.beta, gamma=spec.gamma)
        if spec.nll_coef:
            losses = losses - spec.nll_coef * chosen
        return LossOutput(
            loss=mean_over_pairs(losses, normalizer, said.log_probs.dtype),
            sums={
                **reward_metrics(spec.beta * chosen, spec.beta * rejected, batch),
                "log_prob_chosen": all_of(chosen),
                "log_prob_rejected": all_of(rejected),
                "nll": all_of(-chosen),
                "entropy": masked_pair(said.entropy, mask),
            },
        )
