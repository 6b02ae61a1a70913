"""One attempt of a job, from its folder to its outcome."""

import logging
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from algorithms import loop
from algorithms.algorithm import load_algorithm
from algorithms.protocols import Workers
from megatron_backend.checkpoint.fence import Fence, StaleAttempt, exclusive_lock
from megatron_backend.checkpoint.publish import CheckpointStore, Published
from megatron_backend.driver.checkpoints import JobCheckpoints
from megatron_backend.driver.export import export
from megatron_backend.driver.job import Job, keep_model_files, open_job
from megatron_backend.driver.outcome import Stopped, outcome_of, write_outcome
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.workers.ray_session import set_environment
from service.spec import Outcome

log = logging.getLogger("planish")

SUCCEEDED, FAILED, STALE = 0, 1, 2
"""Exit codes of the driver."""


def run_attempt(folder: Path, attempt: int) -> int:
    """Runs an attempt to its end, and writes outcome.json as the last act.

    An attempt that has its outcome already is not run again (a cluster may start the same command
    twice), and one that is stale writes none: its end is known to whoever started the next one.

    Returns:
        The driver's exit code.
    """
    stop = _StopSignal()
    stop.install()
    attempt_folder = folder / "attempts" / str(attempt)
    attempt_folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(attempt_folder / "driver.lock", wait_seconds=10):
        outcome_file = attempt_folder / "outcome.json"
        if outcome_file.exists():
            outcome = Outcome.model_validate_json(outcome_file.read_text(encoding="utf-8"))
            log.info("attempt %d has ended before: %s", attempt, outcome.status)
            return SUCCEEDED if outcome.status == "succeeded" else FAILED
        fence = Fence(folder, attempt)
        ending = _Ending(fence, attempt_folder, stop)
        with ending:
            fence.take()
            _run(open_job(folder, attempt), fence, stop)
        return ending.exit_code


class _StopSignal:
    """What SIGTERM does: it raises `Stopped` in the main thread, wherever that is.

    Ray turns an exception that comes up inside one of its calls into a SystemError, and its own
    handler, in place while it starts, exits. So that the signal came is also remembered here.
    """

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Takes SIGTERM over."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        raise Stopped("stopped by SIGTERM")


class _Ending:
    """Turns whatever ends the block into an outcome and an exit code."""

    def __init__(self, fence: Fence, attempt_folder: Path, stop: _StopSignal) -> None:
        self.exit_code = SUCCEEDED
        self._fence, self._attempt_folder, self._stop = fence, attempt_folder, stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already
        if error is not None and (self._stop.received or isinstance(error, SystemExit)):
            error = Stopped("stopped by SIGTERM")
        stale = error if isinstance(error, StaleAttempt) else self._stale()
        if stale is not None:
            log.error("%s", stale)
            self.exit_code = STALE
            return True
        outcome = outcome_of(error, self._fence.attempt)
        if error is not None:
            log.error("attempt %d failed: %s", self._fence.attempt, outcome.reason, exc_info=error)
            self.exit_code = FAILED
        write_outcome(self._attempt_folder, outcome)
        return True

    def _stale(self) -> StaleAttempt | None:
        """A newer attempt sweeps this one's files away: then errors follow that are no errors."""
        try:
            self._fence.check()
        except StaleAttempt as error:
            return error
        return None


def _run(job: Job, fence: Fence, stop: _StopSignal) -> None:
    recorder = SpoolRecorder(job.folder, job_id=job.context.job_id, attempt=job.attempt)
    try:
        store = CheckpointStore(job.folder, fence)
        store.open()
        newest = store.newest(lambda message: recorder.record("warning", {"message": message}))
        job = _starting_model(keep_model_files(job), newest)
        set_environment(job.layout.world_size)
        # Ray reads its settings when it is imported.
        from megatron_backend.driver.ranks import open_ranks

        with open_ranks(job) as ranks:
            stop.install()  # Ray has put its own handler there
            ranks.load_model()
            _record_start(job, newest, recorder)
            workers = Workers(
                train=ranks.train,
                generator=ranks.generator,
                checkpoints=JobCheckpoints(job, store, newest, ranks.group, recorder),
            )
            step = loop.run(job.context, workers, ranks.tokenizer, recorder)
            if job.context.spec.checkpoint.export:
                export(job, fence, ranks.group, recorder, step=step)
    finally:
        recorder.close()


def _starting_model(job: Job, newest: Published | None) -> Job:
    """A resumed job starts from its own checkpoint, for its source may be gone by now.

    Only a reference model, which is the model as the job started, still needs the source.
    """
    if newest is None or load_algorithm(job.context.spec.algorithm).needs_reference:
        return job
    return job.with_model(kind="checkpoint", weights=str(newest.path))


def _record_start(job: Job, newest: Published | None, recorder: SpoolRecorder) -> None:
    recorder.record(
        "started",
        {
            "layout": asdict(job.layout),
            "world_size": job.layout.world_size,
            "resumed_from_step": None if newest is None else newest.manifest.step,
            "device": "cuda" if job.gpu else "cpu",
        },
    )
