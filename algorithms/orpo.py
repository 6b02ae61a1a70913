"""Odds Ratio Preference Optimization (arXiv 2403.07691).

Supervised fine-tuning on the chosen answer, and a term that makes its odds larger than those of the
rejected one. One model, one stage, no reference.
"""

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.losses.preference import log_odds, odds_ratio_loss, sequence_log_probs
from algorithms.pairs import all_of, mean_over_pairs, reward_metrics, whole_pairs
from service.spec import OrpoSpec


class Orpo(Algorithm):
    """Likelihood of the chosen answer, and the odds ratio of the two."""

    def __init__(self, spec: OrpoSpec) -> None:
        self._spec = spec

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """-mean log p(chosen) - beta log sigmoid(log odds ratio), a mean over pairs (eq. 6)."""
        spec, said, mask = self._spec, policy_outputs(outputs), batch.loss_mask
        means = sequence_log_probs(said.log_probs, mask, mean=True)
        chosen, rejected = whole_pairs(means, batch)
        log_odds_ratio = log_odds(chosen) - log_odds(rejected)
        preference = odds_ratio_loss(log_odds_ratio)
        return LossOutput(
            loss=mean_over_pairs(spec.beta * preference - chosen, normalizer, said.log_probs.dtype),
            sums={
                **reward_metrics(spec.beta * chosen, spec.beta * rejected, batch),
                "log_odds_ratio": all_of(log_odds_ratio),
                "odds_ratio_loss": all_of(preference),
                "log_prob_chosen": all_of(chosen),
                "log_prob_rejected": all_of(rejected),
                "nll": all_of(-chosen),
                "entropy": masked_pair(said.entropy, mask),
            },
        )
