"""Between what was sampled and what is trained: scores, log-probs, values, advantages.

All of it is asked of the models as they are before the step's first update, on the driver, of the
whole batch. So nothing here depends on how a batch is split over ranks.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch
from algorithms.phases import PhaseClock
from algorithms.protocols import Scorer, Workers
from algorithms.reference_cache import ReferenceCache
from algorithms.samples import Rollout, Samples
from service.spec import JobSpec, RewardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a step trains on.

    Attributes:
        batch: with everything that the losses read.
        metrics: of the samples and their advantages.
    """

    batch: Batch
    metrics: Mapping[str, float]


def prepare(
    samples: Samples,
    spec: JobSpec,
    algorithm: Algorithm,
    workers: Workers,
    clock: PhaseClock,
    *,
    references: ReferenceCache | None = None,
) -> Prepared:
    """A step's batch, whole.

    Args:
        samples: as they were drawn.
        spec: the job's.
        algorithm: the driver's half.
        workers: the models.
        clock: times `reward`, `logprobs` and `advantage`.
        references: what the reference said of rows that were drawn before.
    """
    rollout, metrics = samples.rollout, dict(samples.metrics)
    if rollout is not None and workers.scorer is not None:
        with clock("reward"):
            rollout, score = _with_scores(rollout, spec, workers.scorer)
            metrics |= score
            if samples.greedy is not None:
                greedy, _ = _with_scores(samples.greedy, spec, workers.scorer)
                rollout = rollout.with_baselines(greedy)
    batch = samples.batch
    if rollout is not None:
        batch = batch.masked(rollout.scored)
        if spec.reward != RewardSpec() and rollout.scored.any():
            metrics["reward_weighted_mean"] = float(rollout.returns[rollout.scored].mean())
    with clock("logprobs") if _asks_models(spec, algorithm) else nullcontext():
        batch = _with_old(batch, algorithm, workers)
        if spec.algorithm.keeps_reference:
            batch = _with_reference(batch, samples.rows, workers, references)
        batch = _with_others(batch, algorithm, workers)
    if rollout is not None and spec.algorithm.learns_from_rewards:
        with clock("advantage"):
            credit = algorithm.advantages(replace(rollout, batch=batch))
            batch = batch.with_per_token(advantages=credit.advantages.float())
            if credit.returns is not None:
                batch = batch.with_per_token(returns=credit.returns.float())
            metrics |= credit.metrics
    return Prepared(batch=batch, metrics=metrics)


def _with_scores(
    rollout: Rollout, spec: JobSpec, scorer: Scorer
) -> tuple[Rollout, dict[str, float]]:
    """Adds the reward model's scores, weighted, at each row's last token."""
    scores = scorer.scores(rollout.batch).double()
    rewards, rows = rollout.rewards.clone(), torch.arange(len(scores))
    rewards[rows, rollout.last] += spec.reward.model_weight * scores
    played = scores[rollout.scored]
    mean = {"reward_model_mean": float(played.mean())} if len(played) else {}
    return replace(rollout, rewards=rewards), mean


def _asks_models(spec: JobSpec, algorithm: Algorithm) -> bool:
    of = spec.algorithm
    others = of.keeps_reference or of.critic is not None or of.teacher is not None
    return algorithm.needs_old_log_probs or others


def _with_old(batch: Batch, algorithm: Algorithm, workers: Workers) -> Batch:
    if not algorithm.needs_old_log_probs:
        return batch
    return batch.with_per_token(old_log_probs=workers.train.log_probs(batch))


def _with_reference(
    batch: Batch,
    rows: Sequence[int] | None,
    workers: Workers,
    references: ReferenceCache | None,
) -> Batch:
    def ask() -> Tensor:
        return workers.train.log_probs(batch, model="reference")

    if references is None or rows is None:
        return batch.with_per_token(reference_log_probs=ask())
    return batch.with_per_token(reference_log_probs=references.log_probs(batch, rows, ask))


def _with_others(batch: Batch, algorithm: Algorithm, workers: Workers) -> Batch:
    """Adds what the critic, and the algorithm's own questions to models, say of the batch."""
    if workers.critic is not None:
        batch = batch.with_per_token(values=workers.critic.values(batch))
    return algorithm.prepare(batch, workers)
