"""Does what `decisions` decided, for the holder of a job's claim.

Every action can be done again: one that was cut short by a kill is decided anew from what is stored
and seen, and finds its own traces.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from service.auth.keys import hash_secret
from service.jobs.folder import AttemptFolder, JobFolder
from service.jobs.records import Attempt, Job
from service.jobs.states import JobState
from service.launchers.protocol import Launcher, LaunchError, LaunchRequest, Observation
from service.reconciler import decisions
from service.reconciler.observer import Observer, calling
from service.reconciler.spool import last_words, spooled
from service.reconciler.verdicts import failures, judge, next_state
from service.spec import JobContext, Outcome, Reason
from service.spec.spans import SpanName
from service.store import Claim, Store
from service.store.attempts import AttemptEnd
from service.tracing import ServiceTracing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things may take, in seconds."""

    sweep: float = 0.5
    """Pause between two looks at all jobs; a wish in this process is seen at once."""
    lease: float = 15.0
    """A claim of a reconciler that was killed is void after this."""
    grace: float = 20.0
    """How long an attempt may take to end by itself when it is asked to."""
    retry_base: float = 1.0
    """Wait before the first retry; it doubles with each failure of the same kind."""
    retry_most: float = 60.0
    """Longest wait before a retry."""


@dataclass(frozen=True, slots=True)
class Actions:
    """The hands of the reconciler."""

    store: Store
    launchers: Mapping[str, Launcher]
    jobs_dir: Path
    base_url: str
    timing: Timing
    observer: Observer
    tracing: ServiceTracing

    def folder(self, job_id: str) -> JobFolder:
        """The job's folder."""
        return JobFolder(self.jobs_dir / job_id)

    def do(self, action: decisions.Action, job: Job, claim: Claim) -> None:
        """Does one action.

        Raises:
            ClaimLost: another reconciler holds the job; whatever was not stored is void.
            LauncherUnavailable: nothing is known; decide again later.
        """
        match action:
            case decisions.Wait():
                pass
            case decisions.Queue():
                self.store.jobs.queue(claim)
            case decisions.Open():
                with self.tracing.attempt(SpanName.OPEN, job, job.attempt_count + 1):
                    self._open(job, claim)
            case decisions.EndUnstarted(state, reason, message):
                self._shut_out_last(job)
                self.store.jobs.end_without_attempt(claim, state, reason, message)
            case decisions.Submit(attempt, context):
                with self.tracing.attempt(SpanName.SUBMIT, job, attempt.number):
                    self._submit(attempt, context, claim)
            case decisions.MarkAlive(attempt):
                self.store.attempts.alive(claim, attempt.number)
            case decisions.Stop(attempt, reason, message):
                self.store.attempts.stopping(claim, attempt.number, reason, message)
            case decisions.AskToEnd():
                self.ask_to_end(action)
            case decisions.Finish(attempt, seen, finished_context):
                with self.tracing.attempt(SpanName.END, job, attempt.number):
                    self._finish(attempt, seen, finished_context, claim)

    def ask_to_end(self, action: decisions.AskToEnd) -> None:
        """Has the launcher end the attempt; needs no claim, since it changes no row."""
        attempt = action.attempt
        if attempt.stop_reason is not None:
            folder = self.folder(attempt.job_id).attempt(attempt.number)
            folder.write_stop(attempt.stop_reason)
        self._cancel(attempt, action.grace_seconds)

    def _cancel(self, attempt: Attempt, grace_seconds: float) -> None:
        launcher = self.launchers.get(attempt.launcher)
        if launcher is None:
            return  # the operator took the cluster away; nothing can be told to it
        with calling(self.observer, attempt.launcher, "cancel"):
            launcher.cancel(attempt.launcher_id, grace_seconds)

    def _open(self, job: Job, claim: Claim) -> None:
        launcher = self.launchers[job.cluster]
        attempt = self.store.attempts.open(
            claim,
            launcher=job.cluster,
            launcher_id=launcher.identify(job.id, job.attempt_count + 1),
            capacity=launcher.capacity,
        )
        if attempt is not None and attempt.number == 1:
            self.observer.left_queue(job.cluster, attempt.created_at - job.created_at)

    def _submit(self, attempt: Attempt, context: JobContext, claim: Claim) -> None:
        request = LaunchRequest(
            job_id=attempt.job_id,
            attempt=attempt.number,
            job_dir=self.folder(attempt.job_id).path,
            context=self.tracing.for_driver(context),
        )
        try:
            token = self._prepare(request)
            self.store.attempts.set_token(claim, attempt.number, hash_secret(token))
            with calling(self.observer, attempt.launcher, "submit"):
                self.launchers[attempt.launcher].submit(request)
        except (LaunchError, OSError) as error:
            _log.warning("attempt %s of job %s: %s", attempt.number, attempt.job_id, error)
            # From here on the attempt is stopped like any other, so a process of it that is
            # late after all is found and ended.
            self.tracing.note({"planish.reason": Reason.LAUNCH_FAILED})
            self.store.attempts.stopping(
                claim, attempt.number, Reason.LAUNCH_FAILED, f"could not be started: {error}"
            )

    def _prepare(self, request: LaunchRequest) -> str:
        """Writes the files that a driver needs; returns the attempt's token."""
        folder = self.folder(request.job_id)
        folder.write_context(request.context)
        folder.write_endpoint(self.base_url)
        folder.raise_fence(request.attempt)
        return folder.attempt(request.attempt).make_token()

    def _shut_out_last(self, job: Job) -> None:
        """Its last attempt has ended, but a cluster may have queued it again by itself since."""
        if job.attempt_count > 0:
            self._cancel(self.store.attempts.get(job.id, job.attempt_count), 0.0)

    def _finish(
        self, attempt: Attempt, seen: Observation, context: JobContext | None, claim: Claim
    ) -> None:
        folder = self.folder(attempt.job_id).attempt(attempt.number)
        self._drain(folder, attempt, claim)
        verdict = judge(attempt, seen, _outcome(folder, attempt), last_words(folder.log_path))
        earlier = [
            other
            for other in self.store.attempts.of_job(attempt.job_id)
            if other.number < attempt.number
        ]
        before = 0
        if verdict.reason is not None:
            newest_steps = self.store.events.newest_checkpoints(attempt.job_id)
            before = failures(verdict.reason, attempt.number, earlier, newest_steps)
        state = next_state(verdict.reason, before, context.spec.retry if context else None)
        self.tracing.note({"planish.reason": verdict.reason, "planish.job_state": state})
        if state is not JobState.RECOVERING:
            # A cluster may have queued it again by itself; nothing of it may start any more.
            self._cancel(attempt, 0.0)
        self.store.attempts.end(
            claim,
            attempt.number,
            AttemptEnd(
                next_state=state,
                reason=verdict.reason,
                message=verdict.message,
                exit_code=seen.exit_code,
                exit_signal=seen.exit_signal,
                retry_at=self._retry_at(state, before),
            ),
        )

    def _drain(self, folder: AttemptFolder, attempt: Attempt, claim: Claim) -> None:
        for batch in spooled(folder.events_path, after_seq=attempt.last_seq):
            self.store.events.drain(claim, attempt.number, batch)
            self.store.claims.extend(claim, lease_seconds=self.timing.lease)

    def _retry_at(self, state: JobState, failed_before: int) -> float | None:
        if state is not JobState.RECOVERING:
            return None
        wait = self.timing.retry_base * 2.0 ** min(failed_before, 30)
        return time.time() + min(wait, self.timing.retry_most)


def _outcome(folder: AttemptFolder, attempt: Attempt) -> Outcome | None:
    try:
        outcome = folder.outcome()
    except ValueError as error:
        # The driver is not to be trusted with its last words; without them it counts as lost.
        _log.warning("attempt %s of job %s: %s", attempt.number, attempt.job_id, error)
        return None
    return outcome if outcome is not None and outcome.attempt == attempt.number else None
