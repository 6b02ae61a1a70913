"""The training loop: the same for every algorithm, offline or online.

It knows an algorithm by its Protocol, data by `Source`, the cluster by `Workers`. Everything that a
later process needs to go on is in a checkpoint or follows from the step's number: questions, draws
and the learning rate are functions of the step, the order of rows has a cursor. So a run that is
killed and resumed takes the same steps as one that is not.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.algorithm import Algorithm, load_algorithm
from algorithms.data.dataset import Dataset
from algorithms.data.source import validate
from algorithms.errors import JobFailure
from algorithms.evaluate import Evaluator
from algorithms.faults import StepGuard, StepRefused
from algorithms.phases import Around, PhaseClock, nothing_around
from algorithms.prepare import Prepared, prepare
from algorithms.protocols import Recorder, Workers
from algorithms.reference_cache import ReferenceCache
from algorithms.samples import Samples, Source
from algorithms.setup import open_parts
from algorithms.update import Updates
from service.spec import JobContext
from service.spec.spans import SpanName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROGRESS_SECONDS = 1.0
"""Progress within a step is recorded at most this often; each step's end always is."""


def open_loop(
    context: JobContext,
    workers: Workers,
    tokenizer: "PreTrainedTokenizerFast",
    recorder: Recorder,
    *,
    stop: Callable[[], JobFailure | None] = lambda: None,
    folder: Path | None = None,
    around: Around = nothing_around,
) -> "Loop":
    """Opens what a job trains on; `Loop.run` then trains it.

    Args:
        context: the job.
        workers: the model; none of it is asked for anything yet. `workers.generator` may be None
            for offline training without episodes to evaluate.
        tokenizer: a fast tokenizer with a chat template.
        recorder: takes `progress`, `metrics`, `evaluation`, `sample` and `warning` events;
            `checkpoint` events are the `Checkpoints` implementation's to record.
        stop: asked after each step; where it has an answer, the loop saves and raises it.
        folder: where what is computed once is kept for later attempts; None keeps it in memory.
        around: is entered around each round of the loop, and in it around the phases of the step,
            evaluations and saves.

    Raises:
        JobFailure: what the job names cannot be used.
    """
    parts = open_parts(context, workers, tokenizer, recorder, folder=folder)
    return Loop(
        context=context,
        workers=workers,
        recorder=recorder,
        algorithm=load_algorithm(context.spec.algorithm),
        source=parts.source,
        evaluator=parts.evaluator,
        validation=parts.validation,
        padding_id=parts.padding_id,
        references=parts.references,
        validation_references=parts.validation_references,
        stop=stop,
        around=around,
    )


def run(
    context: JobContext,
    workers: Workers,
    tokenizer: "PreTrainedTokenizerFast",
    recorder: Recorder,
) -> int:
    """Opens and runs a loop; the step that the job ended at.

    Raises:
        JobFailure: the job cannot go on, with the reason.
    """
    return open_loop(context, workers, tokenizer, recorder).run()


@dataclass(slots=True, kw_only=True)
class Loop:
    """One job's loop. `step` is the last step that was taken or left out.

    `run` may be called again after it raised: it goes on from the newest checkpoint, or from the
    start where there is none, and then needs workers that are as they were at the start.
    """

    context: JobContext
    workers: Workers
    recorder: Recorder
    algorithm: Algorithm
    source: Source
    evaluator: Evaluator | None
    validation: Dataset | None
    padding_id: int
    references: ReferenceCache | None = None
    validation_references: ReferenceCache | None = None
    stop: Callable[[], JobFailure | None] = lambda: None
    around: Around = nothing_around
    step: int = 0
    guard: StepGuard = field(init=False)
    _updates: Updates = field(init=False)
    _start: Mapping[str, Any] = field(init=False)
    _synced: int | None = None
    _evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    _progress_at: float = 0.0

    def __post_init__(self) -> None:
        spec = self.context.spec
        self.guard = StepGuard(spec.faults, losses=spec.algorithm.comparable_loss)
        self._updates = Updates(
            spec,
            self.algorithm,
            self.workers,
            self.guard,
            self.recorder,
            total_steps=self.source.total_steps,
        )
        self._start = self.source.state()

    def run(self) -> int:
        """Every step that is left; the step that the job ended at.

        Raises:
            JobFailure: the job cannot go on, with the reason.
        """
        try:
            self._run()
        except JobFailure:
            # The ranks are well: what was saved before the failure shall not be lost with it.
            self.workers.checkpoints.drain()
            raise
        return self.step

    def _run(self) -> None:
        spec, total = self.context.spec, self.source.total_steps
        self._go_on_from(self.workers.checkpoints.load_latest())
        if self.step == 0 and spec.evaluation.at_start:
            self._evaluate()
        while self.step < total:
            with self.around(SpanName.STEP, self.step + 1):
                self._round(self.step + 1)
        self.workers.checkpoints.drain()

    def _round(self, step: int) -> None:
        """A step, and what is due after it."""
        spec = self.context.spec
        self._train_step(step)
        last = self.step == self.source.total_steps
        if last or _due(self.step, spec.evaluation.every_steps):
            self._evaluate()
        failure = None if last else self.stop()
        if last or failure or _due(self.step, spec.checkpoint.every_steps):
            self._save(required=last)
        if failure is not None:
            raise failure

    def _train_step(self, step: int) -> None:
        """One step of the job: samples, their log-probs and advantages, updates, sync."""
        self._evaluations.clear()
        clock = PhaseClock(
            on_enter=lambda phase: self._enter(step - 1, phase),
            around=lambda phase: self.around(phase, step),
        )
        samples = self.source.draw(step, clock)
        if step in self.guard.left_out:
            self._leave_out(samples, step)
            return
        prepared = self._prepare(samples, clock, self.references)
        try:
            with clock("update"):
                updated = self._updates.take(prepared.batch, step)
        except StepRefused as refused:
            self._refuse(refused, samples)
            return
        self.step = step
        if self.source.online:
            with clock("sync"):
                self._sync()
        self._record_step(samples, prepared, updated, clock)

    def _prepare(
        self, samples: Samples, clock: PhaseClock, references: ReferenceCache | None
    ) -> Prepared:
        return prepare(
            samples,
            self.context.spec,
            self.algorithm,
            self.workers,
            clock,
            references=references,
        )

    def _refuse(self, refused: StepRefused, samples: Samples) -> None:
        """Leaves a step out, now or after going back to the last checkpoint.

        Raises:
            JobFailure: NAN_LOSS; the job is to stop.
        """
        policy = self.guard.policy(refused)
        left_out = set(self.guard.left_out)
        state = None
        if policy == "rewind":
            # Else how far it goes back would depend on how fast the disk is.
            self.workers.checkpoints.drain()
            state = self.workers.checkpoints.load_latest()
        if state is not None:
            self._go_on_from(state)
            action = f"the job goes back to step {self.step} and leaves this one out"
            self.guard.left_out |= left_out
        else:
            action = "it is left out"
            self._leave_out(samples, refused.step)
        self.recorder.record(
            "warning",
            {"message": f"{refused}; {action}", "transient": False, "policy": policy},
            step=refused.step,
        )

    def _leave_out(self, samples: Samples, step: int) -> None:
        """The step passes; updates that it took before the one that went wrong stay."""
        self.step = step
        if self.source.online:
            self._sync()
        for warning in samples.warnings:
            self.recorder.record("warning", warning, step=step)
        self.recorder.record("metrics", {**samples.metrics, "left_out": 1}, step=step)
        self._progress(step, "done", always=True)

    def _record_step(
        self, samples: Samples, prepared: Prepared, updated: Mapping[str, float], clock: PhaseClock
    ) -> None:
        for warning in samples.warnings:
            self.recorder.record("warning", warning, step=self.step)
        batch = prepared.batch
        metrics = {
            **prepared.metrics,
            **updated,
            "tokens": int(batch.loss_mask.sum()),
            "samples": int((batch.loss_mask.sum(dim=1) > 0).sum()),
            **clock.seconds(),
            **self._copies(),
        }
        self.recorder.record("metrics", metrics, step=self.step)
        self._progress(self.step, "done", always=True)

    def _copies(self) -> dict[str, float]:
        """Whether tied weights that are kept twice are still the same, at steps that are saved.

        A checkpoint holds one of them, so a run that is resumed would be another one.
        """
        if not _due(self.step, self.context.spec.checkpoint.every_steps):
            return {}
        difference = self.workers.train.tied_difference()
        if difference is None:
            return {}
        if difference:
            message = (
                f"step {self.step}: the copies of the tied embedding on the first and the last "
                f"stage differ by up to {difference:g}; a fault of the hardware, or a bug of ours"
            )
            self.recorder.record("warning", {"message": message}, step=self.step)
        return {"tied_difference": difference}

    def _evaluate(self) -> None:
        if self.validation is not None or self.evaluator is not None:
            with self.around(SpanName.EVALUATION, self.step):
                self._evaluate_with_all()

    def _evaluate_with_all(self) -> None:
        if self.validation is not None:
            self._progress(self.step, "validation", always=True)
            found = validate(
                self.workers.train,
                self.validation,
                batch_size=self.context.spec.training.global_batch_size,
                padding_id=self.padding_id,
                max_length=self.context.spec.training.max_length,
                prepare=lambda samples: (
                    self._prepare(samples, PhaseClock(), self.validation_references).batch
                ),
            )
            items = len(self.validation.examples)
            self._record_evaluation({"mode": "validation", "items": items, **found})
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

    def _go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Puts the loop, and what samples, where the workers' newest checkpoint is; None is the
        start."""
        self.recorder.replay()
        self._synced = None
        self._evaluations.clear()
        self.step = 0 if state is None else int(state["step"])
        self.source.restore(self._start if state is None else state["source"])
        self.guard.restore(None if state is None else state.get("faults"))
        self.algorithm.restore({} if state is None else state.get("algorithm", {}))
        if self.source.online:
            self._sync()

    def _save(self, *, required: bool) -> None:
        self._progress(self.step, "checkpoint", always=True)
        state = {
            "step": self.step,
            "source": self.source.state(),
            "faults": self.guard.state(),
            "algorithm": self.algorithm.state(),
        }
        with self.around(SpanName.CHECKPOINT, self.step):
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


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
