"""One attempt of a job, from its folder to its outcome."""

import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from algorithms import loop
from algorithms.errors import JobFailure
from algorithms.protocols import Workers
from megatron_backend import tracing
from megatron_backend.checkpoint.fence import Fence, StaleAttempt
from megatron_backend.checkpoint.publish import Published
from megatron_backend.driver.checkpoints import JobCheckpoints
from megatron_backend.driver.export import export
from megatron_backend.driver.job import Job, keep_model_files, open_job
from megatron_backend.driver.metrics import JobMetrics, MetricsServer
from megatron_backend.driver.outcome import Stopped, outcome_of, write_outcome
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.driver.start import Start, open_start
from megatron_backend.driver.stop import StopSignal, cluster_bounds
from megatron_backend.driver.tokenizers import check_tokenizers
from megatron_backend.workers.ray_session import set_environment
from service.spec import Outcome, Reason
from service.spec.attempt import attempt_path
from service.spec.durable import fsync_file, write_text
from service.spec.fence import exclusive_lock
from service.spec.spans import SpanName

if TYPE_CHECKING:  # at run time Ray must not be imported yet
    from megatron_backend.driver.ranks import JobRanks

log = logging.getLogger("planish")

SUCCEEDED, FAILED, STALE = 0, 1, 2
"""Exit codes of the driver."""
LOCK_SECONDS = 120.0
"""A file server keeps the lock of a driver whose machine vanished for about 90 s."""


def run_attempt(folder: Path, attempt: int) -> int:
    """Runs an attempt to its end, and writes outcome.json as the last act.

    A cluster may start the same command twice (`service.spec.attempt`). An attempt that has its
    outcome already is not run again; nor is one whose first start is gone without an outcome, which
    gets one that says so. A start beside a driver that lives does nothing. One that is stale writes
    no outcome: its end is known to whoever started the next one.

    Returns:
        The driver's exit code.
    """
    attempt_folder = attempt_path(folder, attempt)
    attempt_folder.mkdir(parents=True, exist_ok=True)
    stop = StopSignal(attempt_folder)
    stop.install()
    with ExitStack() as held:
        try:
            lock = exclusive_lock(attempt_folder / "driver.lock", wait_seconds=LOCK_SECONDS)
            held.enter_context(lock)
        except TimeoutError:
            log.error("attempt %d has a driver already, which lives; this one ends", attempt)
            return STALE
        except Stopped as error:
            log.error("%s while it waited for another driver of attempt %d", error, attempt)
            return STALE
        return _run_locked(folder, attempt_folder, attempt, stop)


def _run_locked(folder: Path, attempt_folder: Path, attempt: int, stop: StopSignal) -> int:
    outcome_file = attempt_folder / "outcome.json"
    if outcome_file.exists():
        outcome = Outcome.model_validate_json(outcome_file.read_text(encoding="utf-8"))
        log.info("attempt %d has ended before: %s", attempt, outcome.status)
        return SUCCEEDED if outcome.status == "succeeded" else FAILED
    fence = Fence(folder, attempt)
    ending = _Ending(fence, attempt_folder, stop)
    with ending:
        fence.take()
        _start_once(attempt_folder, attempt)
        job = open_job(folder, attempt)
        ending.trace = tracing.AttemptTrace(job.context, attempt)
        _run(job, fence, stop)
    return ending.exit_code


def _start_once(attempt_folder: Path, attempt: int) -> None:
    """Makes `started`, which is on disk before anything else is done.

    Raises:
        JobFailure: it is there; since the lock is ours, whoever made it is gone.
    """
    try:
        write_text(attempt_folder / "started", "")
    except FileExistsError:
        raise JobFailure(
            Reason.NODE_FAILURE,
            f"attempt {attempt} was started a second time by the cluster: its first start was "
            "lost, most likely with its machine. The next attempt goes on from the last checkpoint",
        ) from None
    fsync_file(attempt_folder)


class _Ending:
    """Turns whatever ends the block into an outcome and an exit code.

    Attributes:
        exit_code: the driver's.
        trace: ends with the block.
    """

    def __init__(self, fence: Fence, attempt_folder: Path, stop: StopSignal) -> None:
        self.exit_code = SUCCEEDED
        self.trace = tracing.AttemptTrace()
        self._fence, self._attempt_folder, self._stop = fence, attempt_folder, stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        self._stop.ignore()  # it is ending already
        if error is not None:
            error = self._stop.cause(error)
        stale = error if isinstance(error, StaleAttempt) else self._stale()
        if stale is not None:
            log.error("%s", stale)
            self.trace.close("STALE")
            self.exit_code = STALE
            return True
        outcome = outcome_of(error, self._fence.attempt)
        if error is not None:
            log.error("attempt %d failed: %s", self._fence.attempt, outcome.reason, exc_info=error)
            self.exit_code = FAILED
        self.trace.close(outcome.reason)
        write_outcome(self._attempt_folder, outcome)
        return True

    def _stale(self) -> StaleAttempt | None:
        """A newer attempt sweeps this one's files away: then errors follow that are no errors."""
        try:
            self._fence.check()
        except StaleAttempt as error:
            return error
        return None


def _run(job: Job, fence: Fence, stop: StopSignal) -> None:
    bounds = cluster_bounds()
    metrics = JobMetrics(job.context)
    with ExitStack() as held:
        held.callback(MetricsServer(metrics).close)
        recorder = SpoolRecorder(
            job.folder, job_id=job.context.job_id, attempt=job.attempt, on_event=metrics.take
        )
        held.enter_context(_closing(recorder, stop))
        with tracing.span(SpanName.CHECKPOINTS):
            start = open_start(
                job, fence, lambda message: recorder.record("warning", {"message": message})
            )
        job = keep_model_files(job)
        check_tokenizers(job)
        set_environment(job.processes)
        # Ray reads its settings when it is imported.
        from megatron_backend.driver.ranks import open_ranks

        with open_ranks(job, recorder) as ranks:
            stop.install()  # Ray has put its own handler there
            try:
                _train(job, fence, start, ranks, recorder, stop, bounds)
            finally:
                stop.ignore()  # the end is known; a signal while all is put away must not change it


@contextmanager
def _closing(recorder: SpoolRecorder, stop: StopSignal) -> Iterator[None]:
    """Closes the recorder after the block, whose own error is the one that counts."""
    try:
        yield
    except BaseException:
        stop.ignore()
        try:
            recorder.close()
        except OSError as error:
            log.error("the last events may not be on disk: %s", error)
        raise
    recorder.close()


def _train(
    job: Job,
    fence: Fence,
    start: Start,
    ranks: "JobRanks",
    recorder: SpoolRecorder,
    stop: StopSignal,
    bounds: Mapping[signal.Signals, float],
) -> None:
    """Trains to the end and exports; ranks that fail on the way are started anew."""
    checkpoints = JobCheckpoints(job, start, ranks.group, recorder)
    with tracing.span(SpanName.DATA):
        training = _open_loop(job, ranks, checkpoints, recorder, stop)
    started = False

    def work() -> None:
        nonlocal started
        ranks.load_model(fresh=checkpoints.newest is None)
        if not started:
            _record_start(job, start.newest, recorder)
            started = True
        with stop.finishing(job.context.spec.faults.grace_seconds, bounds):
            step = training.run()
        if job.context.spec.checkpoint.export:
            with tracing.span(SpanName.EXPORT, step):
                export(job, fence, ranks.group, recorder, step=step)

    ranks.restarting(work)


def _open_loop(
    job: Job,
    ranks: "JobRanks",
    checkpoints: JobCheckpoints,
    recorder: SpoolRecorder,
    stop: StopSignal,
) -> loop.Loop:
    workers = Workers(
        train=ranks.train,
        generator=ranks.generator,
        checkpoints=checkpoints,
        critic=ranks.critic,
        scorer=ranks.frozen.scorer,
        teacher=ranks.frozen.teacher,
    )
    return loop.open_loop(
        job.context,
        workers,
        ranks.tokenizer,
        recorder,
        stop=stop.failure,
        folder=job.folder / "reference",
        around=tracing.span,
    )


def _record_start(job: Job, newest: Published | None, recorder: SpoolRecorder) -> None:
    recorder.record(
        "started",
        {
            "layout": job.layout.to_json(),
            "world_size": job.layout.world_size,
            "resumed_from_step": None if newest is None else newest.manifest.step,
            "device": "cuda" if job.gpu else "cpu",
        },
    )
