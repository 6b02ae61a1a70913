"""The training loop: the same for every algorithm, offline or online.

It knows an algorithm by its Protocol, data by `Source`, the cluster by `Workers`. Everything that a
later process needs to go on is in a checkpoint or follows from the step's number: questions, draws
and the learning rate are functions of the step, the order of rows has a cursor. So a run that is
killed and resumed takes the same steps as one that is not.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from algorithms.algorithm import Algorithm, load_algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.data.dataset import Dataset
from algorithms.data.source import validation_loss
from algorithms.errors import JobFailure
from algorithms.evaluate import Evaluator
from algorithms.phases import PhaseClock
from algorithms.protocols import Recorder, StepResult, Workers
from algorithms.samples import Samples, Source
from algorithms.schedule import learning_rate
from algorithms.setup import open_parts
from service.spec import JobContext, Reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROGRESS_SECONDS = 1.0
"""Progress within a step is recorded at most this often; each step's end always is."""


def run(
    context: JobContext,
    workers: Workers,
    tokenizer: "PreTrainedTokenizerFast",
    recorder: Recorder,
) -> int:
    """Trains a job from its last checkpoint, or from the start, to its end.

    Args:
        context: the job.
        workers: the model. `workers.generator` may be None for offline training without episodes
            to evaluate.
        tokenizer: a fast tokenizer with a chat template.
        recorder: takes `progress`, `metrics`, `evaluation`, `sample` and `warning` events;
            `checkpoint` events are the `Checkpoints` implementation's to record.

    Returns:
        The step that the job ended at.

    Raises:
        JobFailure: the job cannot go on, with the reason.
    """
    parts = open_parts(context, workers, tokenizer, recorder)
    loop = Loop(
        context=context,
        workers=workers,
        recorder=recorder,
        algorithm=load_algorithm(context.spec.algorithm),
        source=parts.source,
        evaluator=parts.evaluator,
        validation=parts.validation,
        padding_id=parts.padding_id,
    )
    return loop.run()


@dataclass(slots=True, kw_only=True)
class Loop:
    """One job's loop. `step` is the last step that was taken."""

    context: JobContext
    workers: Workers
    recorder: Recorder
    algorithm: Algorithm
    source: Source
    evaluator: Evaluator | None
    validation: Dataset | None
    padding_id: int
    step: int = 0
    _synced: int | None = None
    _evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    _progress_at: float = 0.0

    def run(self) -> int:
        """Every step that is left; see `run` above."""
        try:
            self._run()
        except JobFailure:
            # The ranks are well: what was saved before the failure shall not be lost with it.
            self.workers.checkpoints.drain()
            raise
        return self.step

    def _run(self) -> None:
        spec, total = self.context.spec, self.source.total_steps
        self._resume()
        if self.source.online:
            self._sync()
        if self.step == 0 and spec.evaluation.at_start:
            self._evaluate()
        while self.step < total:
            self._train_step(self.step + 1)
            last = self.step == total
            if last or _due(self.step, spec.evaluation.every_steps):
                self._evaluate()
            if last or _due(self.step, spec.checkpoint.every_steps):
                self._save(required=last)
        self.workers.checkpoints.drain()

    def _train_step(self, step: int) -> None:
        """One step of the job: samples, their log-probs and advantages, updates, sync."""
        algorithm, train = self.algorithm, self.workers.train
        self._evaluations.clear()
        clock = PhaseClock(on_enter=lambda phase: self._enter(step - 1, phase))
        samples = self.source.draw(step, clock)
        batch = samples.batch
        if algorithm.needs_old_log_probs or algorithm.needs_reference:
            with clock("logprobs"):
                batch = self._with_log_probs(batch)
        if samples.rewards is not None:
            with clock("advantage"):
                batch = with_advantages(batch, algorithm.advantages(samples.rewards))
        normalizer = Normalizer.of(batch)
        rate = learning_rate(self.context.spec.optimizer, step, self.source.total_steps)
        results = []
        with clock("update"):
            for _ in range(algorithm.updates_per_rollout):
                result = train.train_step(batch, normalizer, learning_rate=rate)
                refuse_non_finite(result, step)
                results.append(result)
        self.step = step
        if self.source.online:
            with clock("sync"):
                self._sync()
        self._record_step(samples, batch, results, rate, clock)

    def _with_log_probs(self, batch: Batch) -> Batch:
        """Adds the log-probs that the algorithm asks for, all of before the first update."""
        per_token = dict(batch.per_token)
        if self.algorithm.needs_old_log_probs:
            per_token["old_log_probs"] = self.workers.train.log_probs(batch)
        if self.algorithm.needs_reference:
            per_token["reference_log_probs"] = self.workers.train.log_probs(
                batch, model="reference"
            )
        return replace(batch, per_token=per_token)

    def _record_step(
        self,
        samples: Samples,
        batch: Batch,
        results: Sequence[StepResult],
        rate: float,
        clock: PhaseClock,
    ) -> None:
        for warning in samples.warnings:
            self.recorder.record("warning", warning, step=self.step)
        metrics = {
            **samples.metrics,
            **mean_metrics(results),
            "learning_rate": rate,
            "tokens": int(batch.loss_mask.sum()),
            "samples": int((batch.loss_mask.sum(dim=1) > 0).sum()),
            **clock.seconds(),
        }
        self.recorder.record("metrics", metrics, step=self.step)
        self._progress(self.step, "done", always=True)

    def _evaluate(self) -> None:
        if self.validation is not None:
            self._progress(self.step, "validation", always=True)
            loss = validation_loss(
                self.workers.train,
                self.validation,
                batch_size=self.context.spec.training.global_batch_size,
                padding_id=self.padding_id,
                max_length=self.context.spec.training.max_length,
            )
            data = {"mode": "validation", "items": len(self.validation.examples), "loss": loss}
            self._record_evaluation(data)
        if self.evaluator is not None:
            self._sync()
            for mode in self.evaluator.modes:
                self._progress(self.step, f"evaluation ({mode})", always=True)
                summary, samples = self.evaluator.evaluate(mode)
                self._record_evaluation(summary)
                for sample in samples:
                    self.recorder.record("sample", sample, step=self.step)

    def _record_evaluation(self, data: Mapping[str, Any]) -> None:
        self.recorder.record("evaluation", data, step=self.step)
        self._evaluations.append(data)

    def _resume(self) -> None:
        state = self.workers.checkpoints.load_latest()
        if state is not None:
            self.step = int(state["step"])
            self.source.restore(state["source"])

    def _save(self, *, required: bool) -> None:
        self._progress(self.step, "checkpoint", always=True)
        state = {"step": self.step, "source": self.source.state()}
        self.workers.checkpoints.save(
            self.step, state, evaluations=tuple(self._evaluations), required=required
        )

    def _enter(self, step: int, phase: str) -> None:
        self._progress(step, phase)
        self.workers.checkpoints.poll()

    def _sync(self) -> None:
        """Gives the generator the weights of this step, unless it has them."""
        if self.workers.generator is not None and self._synced != self.step:
            self.workers.generator.sync_weights(self.step)
            self._synced = self.step

    def _progress(self, step: int, phase: str, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            data = {"step": step, "total_steps": self.source.total_steps, "phase": phase}
            self.recorder.record("progress", data)


def with_advantages(batch: Batch, advantages: Sequence[Sequence[float | None]]) -> Batch:
    """Adds `advantages` [B]; a sequence whose advantage is None is trained no more."""
    flat = [advantage for group in advantages for advantage in group]
    kept = torch.tensor([float(advantage is not None) for advantage in flat])
    values = torch.tensor([advantage or 0.0 for advantage in flat], dtype=torch.float32)
    return replace(
        batch,
        loss_mask=batch.loss_mask * kept.unsqueeze(1),
        per_sequence={**batch.per_sequence, "advantages": values},
    )


def mean_metrics(results: Sequence[StepResult]) -> dict[str, float]:
    """Loss, gradient norm and the algorithm's metrics, as means over a step's updates."""
    rows: list[Mapping[str, Any]] = [
        {**result.metrics, "loss": result.loss, "gradient_norm": result.gradient_norm}
        for result in results
    ]
    names = sorted({name for row in rows for name in row})
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}


def refuse_non_finite(result: StepResult, step: int) -> None:
    """Raises JobFailure(NAN_LOSS) where the update was not taken."""
    if not result.finite:
        raise JobFailure(
            Reason.NAN_LOSS,
            f"step {step}: the loss is {result.loss} and the gradient norm {result.gradient_norm}; "
            "the update was not taken. Lower `optimizer.learning_rate`, or look at this step's "
            "data. The last checkpoint holds the weights before it",
        )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
