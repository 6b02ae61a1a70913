"""On-policy distillation (GKD, arXiv 2306.13649).

The student answers, and a teacher says of each of the student's own tokens how it would have gone
on there. So the student learns where it goes itself, right or wrong, and at every token; nothing is
rewarded. Gradients do not flow through the sampling (section 3.1 of the paper).
"""

from dataclasses import replace

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, LossOutput, Normalizer, Outputs, masked_pair, policy_outputs
from algorithms.losses.aggregation import aggregate
from algorithms.losses.distillation import divergence, outcomes
from algorithms.losses.mismatch import rollout_mismatch
from algorithms.protocols import Workers
from service.spec.algorithms.distillation import DIVERGENCES, DistillationSpec


class Distillation(Algorithm):
    """A divergence from the teacher at each token that the student wrote."""

    def __init__(self, spec: DistillationSpec) -> None:
        self._spec = spec

    def prepare(self, batch: Batch, workers: Workers) -> Batch:
        """Asks the teacher for its likeliest tokens, which become the batch's candidates.

        Raises:
            ValueError: there is no teacher.
        """
        if workers.teacher is None:
            raise ValueError("distillation needs workers with a teacher")
        ids, log_probs = workers.teacher.likeliest(batch, self._spec.top_k)
        return replace(batch, candidates={"candidate_ids": ids, "teacher_log_probs": log_probs})

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """The spec's divergence of each trained token, aggregated."""
        spec, said, mask = self._spec, policy_outputs(outputs), batch.loss_mask
        assert said.candidate_log_probs is not None
        nothing = mask == 0
        # What is masked must not reach exp(): 0 * inf would be NaN.
        teacher, student = (
            outcomes(candidates.masked_fill(nothing.unsqueeze(-1), 0.0))
            for candidates in (batch.candidates["teacher_log_probs"], said.candidate_log_probs)
        )
        token_loss = divergence(teacher, student, spec.divergence, js_beta=spec.js_beta)
        sums = {
            "entropy": masked_pair(said.entropy, mask),
            "teacher_top_mass": masked_pair(1.0 - teacher[..., -1].exp(), mask),
            "student_top_mass": masked_pair(1.0 - student.detach()[..., -1].exp(), mask),
            **rollout_mismatch(said.log_probs.masked_fill(nothing, 0.0), batch),
        }
        for kind in DIVERGENCES:
            value = divergence(teacher, student.detach(), kind, js_beta=spec.js_beta)
            sums[kind.replace("-", "_")] = masked_pair(value, mask)
        loss = aggregate(token_loss, mask, spec.loss_aggregation, normalizer)
        return LossOutput(loss=loss, sums=sums)
