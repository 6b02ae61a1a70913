"""Kahneman-Tversky Optimization (arXiv 2402.01306).

People weigh an outcome against what they are used to. Here that is the reference point: how far the
policy is from its reference on any answer, related to the prompt or not (a KL). An answer's reward
is beta times its log-ratio; a good answer is worth more the further it is above that point, a bad
one the further it is below. No pairs are needed.

The point is estimated over the whole batch, by answers under prompts that are not theirs (section
4), before the batch is split. So it is the same for all ranks and micro-batches.
"""

from torch import Tensor

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.errors import JobFailure
from algorithms.losses.preference import kto_loss, sequence_log_probs
from algorithms.pairs import all_of
from algorithms.protocols import Workers
from algorithms.swapped_answers import swapped_answers
from service.spec import KtoSpec, Reason


class Kto(Algorithm):
    """The value of an answer against a reference point."""

    def __init__(self, spec: KtoSpec) -> None:
        self._spec = spec

    def prepare(self, batch: Batch, workers: Workers) -> Batch:
        """Adds `per_sequence["reference_point"]`, the same for each row.

        Raises:
            JobFailure: USER_ERROR; one row has no other to swap answers with.
        """
        if len(batch) < 2:
            raise JobFailure(
                Reason.USER_ERROR,
                "training.global_batch_size: KTO needs 2 rows or more, for its reference point is "
                "taken from answers under the prompts of other rows; it is 1",
            )
        swapped = swapped_answers(batch)
        policy = workers.train.log_probs(swapped)
        reference = workers.train.log_probs(swapped, model="reference")
        point = reference_point(policy - reference, swapped.loss_mask)
        return batch.with_per_sequence(reference_point=point.float().expand(len(batch)).clone())

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """The loss of each answer by its label, a mean over answers (section 4).

        `batch` has `reference_log_probs`, and for each row `desirable` and `reference_point`.
        """
        spec, said, mask = self._spec, policy_outputs(outputs), batch.loss_mask
        rows = mask.sum(dim=1) > 0
        log_ratios = said.log_probs - batch.per_token["reference_log_probs"]
        rewards = spec.beta * sequence_log_probs(log_ratios, mask)[rows]
        point = batch.per_sequence["reference_point"][rows]
        desirable = batch.per_sequence["desirable"][rows]
        losses = kto_loss(
            rewards,
            spec.beta * point.double(),
            desirable,
            desirable_weight=spec.desirable_weight,
            undesirable_weight=spec.undesirable_weight,
        )
        good = desirable > 0
        log_probs = sequence_log_probs(said.log_probs, mask)[rows]
        return LossOutput(
            loss=(losses.sum() / normalizer.sequences).to(said.log_probs.dtype),
            sums={
                "kl": all_of(point),
                "reward_desirable": all_of(rewards[good]),
                "reward_undesirable": all_of(rewards[~good]),
                "log_prob_desirable": all_of(log_probs[good]),
                "log_prob_undesirable": all_of(log_probs[~good]),
                "desirable_share": all_of(good.double()),
                "entropy": masked_pair(said.entropy, mask),
            },
        )


def reference_point(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """The mean log-ratio of whole answers under other prompts, at least 0, as a KL is.

    Args:
        log_ratios: [B, T] of policy to reference.
        mask: [B, T], 1 where a token is an answer's. Rows without any are not counted.

    Returns:
        A float64 scalar.
    """
    rows = (mask.sum(dim=1) > 0).sum().clamp(min=1)
    return (sequence_log_probs(log_ratios, mask).sum() / rows).clamp(min=0.0)
