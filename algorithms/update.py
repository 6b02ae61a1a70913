"""The optimizer steps on one step's batch: passes, mini-batches, the critic beside the policy.

A mini-batch has counts of its own (`Normalizer`): it is an optimizer step like any other. Which
rows it has depends on the job's seed and the step's number alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from algorithms.algorithm import Algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.faults import StepGuard, StepRefused, describe
from algorithms.protocols import Critic, Recorder, StepResult, TrainEngine, Workers
from algorithms.schedule import learning_rate
from algorithms.seeds import derive_seed
from service.spec import JobSpec


class Updates:
    """Takes the updates of one job.

    Args:
        spec: the job's.
        algorithm: the driver's half.
        workers: the models.
        guard: judges each update.
        recorder: is told of passing faults.
        total_steps: of the job, which the schedule of the learning rate follows.
    """

    def __init__(
        self,
        spec: JobSpec,
        algorithm: Algorithm,
        workers: Workers,
        guard: StepGuard,
        recorder: Recorder,
        *,
        total_steps: int,
    ) -> None:
        self._spec, self._algorithm, self._workers = spec, algorithm, workers
        self._guard, self._recorder, self._total_steps = guard, recorder, total_steps
        # Its norms and losses are in no checkpoint, so nothing may depend on them.
        calm = spec.faults.model_copy(update={"on_spike": "ignore"})
        self._critic_guard = StepGuard(calm)

    def take(self, batch: Batch, step: int) -> dict[str, float]:
        """All updates of a step; means of their metrics. None is taken where nothing is trained.

        Raises:
            StepRefused: one went wrong twice. It changed nothing; those before it stay.
        """
        spec = self._spec
        rate = learning_rate(spec.optimizer, step, self._total_steps)
        critic, optimizer = spec.algorithm.critic, spec.critic_optimizer
        critic_rate = (
            None if optimizer is None else learning_rate(optimizer, step, self._total_steps)
        )
        trains_policy = critic is None or step > critic.warmup_steps
        rows: list[Mapping[str, float]] = []
        for part in self._parts(batch, step):
            if not part.loss_mask.any():
                continue  # momentum alone would move the weights
            normalizer = Normalizer.of(part)
            row: dict[str, float] = {}
            if critic_rate is not None:
                assert self._workers.critic is not None
                result = self._update(self._workers.critic, part, normalizer, step, critic_rate)
                row |= {**result.metrics, "value_loss": result.loss}
                row["critic_gradient_norm"] = result.gradient_norm
            if trains_policy:
                result = self._update(self._workers.train, part, normalizer, step, rate)
                row |= {**result.metrics, "loss": result.loss}
                row["gradient_norm"] = result.gradient_norm
            rows.append(row)
        return {**_means(rows), "learning_rate": rate if trains_policy else 0.0}

    def _parts(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The mini-batches of all passes, in order."""
        count, units = self._algorithm.mini_batches, len(batch) // batch.unit
        for number in range(self._algorithm.updates_per_rollout):
            if count == 1:
                yield batch
                continue
            seed = derive_seed(self._spec.training.seed, "mini-batches", step, number)
            order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
            for chosen in order.tensor_split(min(count, units)):
                rows = chosen.unsqueeze(1) * batch.unit + torch.arange(batch.unit)
                yield batch.rows(rows.flatten())

    def _update(
        self,
        engine: TrainEngine | Critic,
        batch: Batch,
        normalizer: Normalizer,
        step: int,
        rate: float,
    ) -> StepResult:
        """One update, tried a second time where the first goes wrong; see `algorithms.faults`."""
        guard = self._guard if engine is self._workers.train else self._critic_guard
        results = []
        for _ in range(2):
            result = engine.train_step(
                batch,
                normalizer,
                learning_rate=rate,
                norm_limit=guard.norm_limit,
                loss_limit=guard.loss_limit,
            )
            results.append(result)
            fault = guard.fault(result)
            if fault is None:
                break
        first, last = results[0], results[-1]
        if fault is not None:
            of_critic = engine is self._workers.critic
            blamed = guard.blamed(engine.trials(batch, normalizer))
            raise StepRefused(step, fault, first, last, of_critic=of_critic, blamed=blamed)
        if first is not last and (passing := guard.fault(first)) is not None:
            message = (
                f"step {step}: {describe(passing, first)}; a second run of the same step was well "
                f"({last.loss:g}, {last.gradient_norm:g}) and counts. That is a passing fault of "
                "the hardware, or a race"
            )
            self._recorder.record("warning", {"message": message, "transient": True}, step=step)
        guard.took(last)
        return last


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it."""
    names = sorted({name for row in rows for name in row})
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}
