"""The loop: look at every job, decide, act, look again.

Looking takes no claim and writes nothing, so a running job costs one cheap query and one poll of
its launcher now and then. Only when something is to be done is the job claimed; then it is looked
at again, since another reconciler may have been quicker. Any number of reconcilers may run against
one database.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection

from service.jobs.records import Attempt, Job
from service.jobs.states import AttemptState, JobState
from service.launchers.protocol import Launcher, LauncherUnavailable, Observation
from service.reconciler import decisions
from service.reconciler.actions import Actions, Timing
from service.reconciler.observer import Nobody, Observer, calling
from service.spec import JobContext
from service.store import Claim, ClaimLost, NotFound, Store
from service.tracing import ServiceTracing

_log = logging.getLogger(__name__)

_AFTER_FAULT_SECONDS = 2.0
_AFTER_BUG_SECONDS = 30.0
_NO_DATABASE = (OperationalError, InterfaceError, NoConnection)
"""It is locked, full or away, or all connections to it are taken."""


class Reconciler:
    """Moves jobs. `start()` runs it in a thread; `sweep()` does one round in the caller's."""

    def __init__(
        self,
        store: Store,
        launchers: Mapping[str, Launcher],
        jobs_dir: Path,
        base_url: str,
        *,
        timing: Timing | None = None,
        observer: Observer | None = None,
        tracing: ServiceTracing | None = None,
    ) -> None:
        """Nothing happens before `start` or `sweep`.

        Args:
            store: where the jobs are.
            launchers: by the name that a job gives as `resources.cluster`.
            jobs_dir: the folder that holds the jobs' folders, each under its job's id.
            base_url: under which workers reach the service.
            timing: pauses and limits.
            observer: is told of rounds and of calls to launchers.
            tracing: makes spans of what is done about attempts.
        """
        self._store = store
        self._launchers = launchers
        self._timing = timing or Timing()
        self._observer = observer or Nobody()
        self._actions = Actions(
            store,
            launchers,
            jobs_dir.resolve(),
            base_url,
            self._timing,
            self._observer,
            tracing or ServiceTracing(),
        )
        self._contexts: dict[str, JobContext | None] = {}
        self._not_before: dict[str, float] = {}
        self._silent_until: dict[str, float] = {}
        self._observations: dict[tuple[str, str], tuple[float, Observation]] = {}
        self._told: set[str] = set()
        self._rung: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.got_on_at: float | None = None
        """`time.monotonic()` when the last job was looked at, or the last round over all of them
        was done, for health checks."""

    def start(self) -> None:
        """Runs in a thread until `stop`."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self.run, name="reconciler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the action it is in; jobs go on without it."""
        self._stopping.set()
        self._rung.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Runs in the calling thread until `stop`."""
        unsubscribe = self._store.wishes.subscribe(self._rung.put)
        try:
            while not self._stopping.is_set():
                self._round()
        finally:
            unsubscribe()

    def sweep(self) -> bool:
        """One round over all jobs that have not ended; tells whether anything was done."""
        started = time.monotonic()
        jobs = self._store.jobs.active()
        acted = False
        for job in jobs:
            acted = self._visit(job) or acted
            self.got_on_at = time.monotonic()
        self._forget_all_but(jobs)
        self.got_on_at = time.monotonic()
        self._observer.round_done(self.got_on_at - started)
        return acted

    def _round(self) -> None:
        try:
            if self.sweep():
                return  # what was done may have made room for another job
            self._wait()
        except Exception:
            # Most often the database does not answer. Nothing is lost: all is looked at anew. A
            # service without its reconciler would look well and move no job, so nothing ends it.
            _log.exception("a round failed; the reconciler tries again")
            self._stopping.wait(_AFTER_FAULT_SECONDS)

    def _wait(self) -> None:
        """Until the next round, looks at jobs that users made or cancelled."""
        until = time.monotonic() + self._pause()
        while not self._stopping.is_set() and time.monotonic() < until:
            try:
                job_id = self._rung.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            if job_id is not None and self._visit_by_id(job_id):
                return

    def _visit_by_id(self, job_id: str) -> bool:
        try:
            return self._visit(self._store.jobs.get(job_id))
        except NotFound:
            return False  # deleted since it rang

    def _pause(self) -> float:
        """Seconds between two rounds: as often as a launcher in use is worth asking."""
        in_use = {launcher for launcher, _ in self._observations}
        return min([self._timing.sweep, *(self._launchers[name].poll_seconds for name in in_use)])

    def _visit(self, job: Job) -> bool:
        """Does all that is to be done for a job now; tells whether that was anything."""
        started = time.monotonic()
        if started < max(
            self._not_before.get(job.id, 0.0), self._silent_until.get(job.cluster, 0.0)
        ):
            return False
        try:
            self._tell_endpoint(job)
            action = decisions.decide(self._look(job))
            if isinstance(action, decisions.AskToEnd):
                self._ask_to_end(job.id)
                return False
            return self._possible(action, job) and self._act(job.id)
        except NotFound:
            return False  # deleted since it was read
        except (LauncherUnavailable, OSError) as error:
            # Its launcher or its folder does not answer. Nothing is known, so nothing is concluded.
            _log.warning("job %s is looked at again later: %s", job.id, error)
            self._not_before[job.id] = time.monotonic() + _AFTER_FAULT_SECONDS
            if isinstance(error, LauncherUnavailable):
                self._leave_alone(job.cluster, waited=time.monotonic() - started)
            return False
        except _NO_DATABASE:
            raise  # it concerns every job
        except Exception:
            # A fault in one job, or in a launcher that somebody added, must not hold up the others.
            _log.exception("job %s could not be looked at; it is tried again later", job.id)
            self._not_before[job.id] = time.monotonic() + _AFTER_BUG_SECONDS
            return False

    def _leave_alone(self, cluster: str, *, waited: float) -> None:
        """Asks a cluster nothing for as long as it kept everybody waiting, so that the jobs of
        others are looked at for half of the time at least."""
        if waited > _AFTER_FAULT_SECONDS:
            self._silent_until[cluster] = time.monotonic() + waited

    def _ask_to_end(self, job_id: str) -> None:
        """Asks, where a look afresh says the same: another service may have started meanwhile what
        an earlier look found nowhere."""
        action = decisions.decide(self._look(self._store.jobs.get(job_id), afresh=True))
        if isinstance(action, decisions.AskToEnd):
            self._actions.ask_to_end(action)

    def _act(self, job_id: str) -> bool:
        claim = self._store.claims.take(job_id, lease_seconds=self._timing.lease)
        if claim is None:
            return False
        try:
            return self._act_with(claim)
        except ClaimLost as error:
            _log.warning("%s", error)
            return True
        finally:
            self._store.claims.release(claim)

    def _act_with(self, claim: Claim) -> bool:
        acted = False
        while not self._stopping.is_set():
            job = self._store.jobs.get(claim.job_id)
            action = decisions.decide(self._look(job, afresh=True))
            if not self._possible(action, job):
                break
            self._actions.do(action, job, claim)
            acted = True
            if isinstance(action, decisions.AskToEnd):
                break  # it takes its time; the claim is not held meanwhile
        return acted

    def _possible(self, action: decisions.Action, job: Job) -> bool:
        if isinstance(action, decisions.Wait):
            return False
        if isinstance(action, decisions.Open) and job.state is JobState.QUEUED:
            capacity = self._launchers[job.cluster].capacity
            return self._store.attempts.may_open(job.id, capacity=capacity)
        return True

    def _look(self, job: Job, *, afresh: bool = False) -> decisions.Look:
        attempt = self._live_attempt(job)
        return decisions.Look(
            job=job,
            context=self._context(job),
            has_launcher=job.cluster in self._launchers,
            attempt=attempt,
            seen=None if attempt is None else self._seen(attempt, afresh=afresh),
            outcome_at=None if attempt is None else self._outcome_at(attempt),
            now=time.time(),
            grace_seconds=self._timing.grace,
        )

    def _live_attempt(self, job: Job) -> Attempt | None:
        if job.attempt_count == 0:
            return None
        attempt = self._store.attempts.get(job.id, job.attempt_count)
        return None if attempt.state is AttemptState.ENDED else attempt

    def _seen(self, attempt: Attempt, *, afresh: bool) -> Observation | None:
        """What the launcher sees, asked again only after its `poll_seconds` or `afresh`."""
        launcher = self._launchers.get(attempt.launcher)
        if launcher is None:
            return None
        key = (attempt.launcher, attempt.launcher_id)
        known = self._observations.get(key)
        if not afresh and known is not None and time.monotonic() < known[0]:
            return known[1]
        with calling(self._observer, attempt.launcher, "poll"):
            seen = launcher.poll(attempt.launcher_id)
        self._observations[key] = (time.monotonic() + 0.9 * launcher.poll_seconds, seen)
        return seen

    def _outcome_at(self, attempt: Attempt) -> float | None:
        path = self._actions.folder(attempt.job_id).attempt(attempt.number).outcome_path
        return path.stat().st_mtime if path.exists() else None

    def _context(self, job: Job) -> JobContext | None:
        if job.id not in self._contexts:
            try:
                self._contexts[job.id] = job.context()
            except ValidationError:
                _log.exception("job %s cannot be read", job.id)
                self._contexts[job.id] = None
        return self._contexts[job.id]

    def _tell_endpoint(self, job: Job) -> None:
        """Tells a driver that outlived an earlier service where this one is, once."""
        if job.id not in self._told:
            folder = self._actions.folder(job.id)
            if folder.path.exists():
                folder.write_endpoint(self._actions.base_url)
            self._told.add(job.id)

    def _forget_all_but(self, jobs: list[Job]) -> None:
        ids = {job.id for job in jobs}
        for known in (self._contexts, self._not_before):
            for job_id in known.keys() - ids:
                del known[job_id]
        live = {
            (job.cluster, launcher.identify(job.id, job.attempt_count))
            for job in jobs
            if (launcher := self._launchers.get(job.cluster))
        }
        for key in self._observations.keys() - live:
            del self._observations[key]
        self._told &= ids
