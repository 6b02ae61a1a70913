"""Runs attempts as batch jobs of SLURM.

One job of SLURM runs one attempt, and the attempts after it where SLURM queues it again: it was
submitted as attempt `first`, and its run number `r` (SLURM's count of restarts) is attempt
`first + r`. So when a job is queued again, the attempt that ran has ended, and `submit` of the next
one finds the job that runs it, and submits nothing (`_adopted`).

What makes a second start impossible, whatever is killed when: sbatch runs under a lock on the
attempt, which it holds itself; before it, the job is looked for by its name; and of two jobs that
were submitted all the same only one can take the attempt (`script`).
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from service.launchers.cluster import RemoteLauncher
from service.launchers.protocol import (
    LaunchError,
    LauncherUnavailable,
    LaunchRequest,
    Observation,
    Phase,
    Submission,
    only_for,
)
from service.launchers.slurm.answers import SlurmJob
from service.launchers.slurm.client import SlurmClient
from service.launchers.slurm.config import LocalTunnelConfig, SlurmCluster
from service.launchers.slurm.ends import IN_WORDS, ran_out_of_memory, why_queued_again
from service.launchers.slurm.files import AttemptFiles, Holder
from service.launchers.slurm.script import batch_script, job_name
from service.launchers.slurm.states import Standing, UnknownState, standing, words
from service.launchers.slurm.tunnel import LocalTunnel, Tunnel
from service.spec import JobSpec, Reason
from service.validation.problems import FieldProblem

_log = logging.getLogger(__name__)


def open_launcher(
    cluster: SlurmCluster, jobs_dir: Path, data_roots: Sequence[Path]
) -> "SlurmLauncher":
    """A launcher for a cluster. Connects to nothing."""
    tunnel = _tunnel(cluster)
    client = SlurmClient(tunnel, bin=cluster.bin, seconds=cluster.poll_seconds)
    return SlurmLauncher(cluster, jobs_dir, data_roots, client=client, tunnel=tunnel)


def _tunnel(cluster: SlurmCluster) -> Tunnel:
    variables = {} if cluster.slurm_conf is None else {"SLURM_CONF": cluster.slurm_conf}
    if isinstance(cluster.tunnel, LocalTunnelConfig):
        return LocalTunnel(seconds=cluster.command_seconds, variables=variables)
    from service.launchers.slurm.nemo_run import NemoRunTunnel

    return NemoRunTunnel(cluster.tunnel, seconds=cluster.command_seconds, variables=variables)


class SlurmLauncher(RemoteLauncher):
    """Launches on one SLURM cluster."""

    def __init__(
        self,
        cluster: SlurmCluster,
        jobs_dir: Path,
        data_roots: Sequence[Path],
        *,
        client: SlurmClient,
        tunnel: Tunnel,
    ) -> None:
        """Knows the jobs that earlier service processes submitted.

        Args:
            cluster: the operator's config.
            jobs_dir: the folder that holds the jobs' folders, each under its job's id.
            data_roots: folders that environments may read files from.
            client: SLURM's commands.
            tunnel: their way there, which is closed with the launcher.
        """
        super().__init__(cluster)
        self.poll_seconds = cluster.poll_seconds
        self._cluster = cluster
        self._jobs_dir = jobs_dir.resolve()
        self._data_roots = tuple(data_roots)
        self._client = client
        self._tunnel = tunnel
        self._lock = threading.Lock()
        self._back_soon_since: dict[tuple[int, int], float] = {}
        self._told: set[str] = set()

    def check(self, spec: JobSpec) -> Sequence[FieldProblem]:
        """Parts of `resources` that have no use here."""
        return only_for(spec, none_of=("kubernetes",), kind="slurm")

    def preview(self, request: LaunchRequest) -> Submission | None:
        """The batch script."""
        return Submission(kind="sbatch", text=self._script(request))

    def identify(self, job_id: str, attempt: int) -> str:
        """`planish-JOB-N`, the name of the job of SLURM where the attempt was not adopted."""
        return job_name(job_id, attempt)

    def submit(self, request: LaunchRequest) -> None:
        """Submits a job, or finds the one that runs the attempt.

        Raises:
            LaunchError: SLURM does not take it.
            LauncherUnavailable: no answer.
        """
        files = AttemptFiles(request.job_dir, request.attempt)
        files.make()
        with files.locked() as lock:
            if files.cancelled(request.attempt):
                return
            holder = files.holder() or self._adopted(request) or self._named(request)
            if holder is None:
                script = self._script(request)
                files.keep_script(script)
                slurm_id = self._client.submit(script, keep=lock)
                holder = Holder(slurm_id=slurm_id, first=request.attempt)
            files.record(holder)

    def poll(self, launcher_id: str) -> Observation:
        """Looks at the job that runs the attempt."""
        files = self._files(launcher_id)
        holder = files.holder()
        if holder is None:
            if files.cancelled(files.attempt):
                return Observation(phase=Phase.EXITED, evidence="it was shut out before it began")
            return Observation(phase=Phase.UNKNOWN, evidence="it was never submitted to SLURM")
        name = self._name_of(launcher_id, holder)
        run = files.attempt - holder.first
        job = self._client.find(holder.slurm_id, name)
        try:
            if job is None:
                return self._forgotten(files, holder, name)
            if job.restarts > run:
                return self._queued_again(files, job, run, name)
            return self._look(files, job, run)
        except UnknownState as error:
            _log.warning("%s: %s", launcher_id, error)
            raise LauncherUnavailable(str(error)) from error

    def cancel(self, launcher_id: str, grace_seconds: float) -> None:
        """A signal to the driver, once; the end of the job when the grace is over.

        A job that SLURM queued again ends with it, since it is the same job.
        """
        files = self._files(launcher_id)
        holder = files.holder()
        if holder is None:
            self._shut_out(launcher_id, files)
            return
        name = self._name_of(launcher_id, holder)
        if grace_seconds > 0 and self._runs(holder, name):
            with self._lock:
                told = launcher_id in self._told
            if not told:
                self._client.tell(holder.slurm_id, name)
                with self._lock:
                    self._told.add(launcher_id)
            return
        files.cancel(holder.first)
        self._client.end(holder.slurm_id, name)

    def close(self) -> None:
        """Closes the tunnel; jobs go on."""
        self._tunnel.close()

    def _script(self, request: LaunchRequest) -> str:
        try:
            return batch_script(self._cluster, request, self._data_roots)
        except ValueError as error:
            raise LaunchError(str(error)) from error

    def _adopted(self, request: LaunchRequest) -> Holder | None:
        """The job that ran the attempt before, where SLURM has queued it again since."""
        before = self._requeued_as(request.job_id, request.attempt)
        if before is None or AttemptFiles(request.job_dir, request.attempt).cancelled(before.first):
            return None
        name = job_name(request.job_id, request.attempt)
        _log.info("%s is run by SLURM job %d, queued again", name, before.slurm_id)
        return before

    def _requeued_as(self, job_id: str, attempt: int) -> Holder | None:
        """The job that ran the attempt before, where this attempt is a later run of it."""
        before = AttemptFiles(self._jobs_dir / job_id, attempt - 1).holder()
        if before is None:
            return None
        job = self._client.find(before.slurm_id, job_name(job_id, before.first))
        return None if job is None or job.restarts < attempt - before.first else before

    def _shut_out(self, launcher_id: str, files: AttemptFiles) -> None:
        """Sees to it that an attempt which no job is known to run never begins."""
        files.cancel(files.attempt)
        # It may have been submitted by a service that was killed before it wrote so down.
        job = self._client.find_named(launcher_id)
        if job is not None:
            self._client.end(job.id, launcher_id)
        # Or SLURM has queued the job of the attempt before again, and would run this one by it.
        before = self._requeued_as(_job_id(launcher_id), files.attempt)
        if before is not None:
            files.cancel(before.first)
            self._client.end(before.slurm_id, self._name_of(launcher_id, before))

    def _named(self, request: LaunchRequest) -> Holder | None:
        """The job that a service submitted which was killed before it wrote its id down."""
        job = self._client.find_named(job_name(request.job_id, request.attempt))
        return None if job is None else Holder(slurm_id=job.id, first=request.attempt)

    def _look(self, files: AttemptFiles, job: SlurmJob, run: int) -> Observation:
        """What the state of a job says about the attempt that is its newest run."""
        at, reason = standing(job.state)
        if at is Standing.BACK_SOON:
            if job.requeue and not self._waited_enough(job, run):
                return Observation(phase=Phase.RUNNING, evidence=f"{job}; SLURM may queue it again")
            at = Standing.ENDED
        if at is not Standing.ENDED:
            return Observation(phase=at.phase, evidence=str(job))
        return _ended(files, job, reason)

    def _waited_enough(self, job: SlurmJob, run: int) -> bool:
        now = time.monotonic()
        with self._lock:
            since = self._back_soon_since.setdefault((job.id, run), now)
        return now - since >= self._cluster.requeue_seconds

    def _queued_again(self, files: AttemptFiles, job: SlurmJob, run: int, name: str) -> Observation:
        """The attempt's run is over, and its job has another, unless it is still being ended."""
        if job.restarts == run + 1 and "COMPLETING" in words(job.state):
            return Observation(
                phase=Phase.RUNNING, evidence=f"{job}; its processes are being ended"
            )
        reason = why_queued_again(run, self._client.runs(job.id, name), files.last_words())
        return Observation(
            phase=Phase.EXITED,
            exit_code=files.exit_code(),
            reason=reason,
            evidence=f"{IN_WORDS[reason]}; SLURM has queued its job {job.id} again",
        )

    def _forgotten(self, files: AttemptFiles, holder: Holder, name: str) -> Observation:
        """slurmctld knows the job no more: accounting, and then what the script left, must tell."""
        run = files.attempt - holder.first
        runs = self._client.runs(holder.slurm_id, name)
        if run < len(runs):
            at, reason = standing(runs[run].state)
            if at in (Standing.ENDED, Standing.BACK_SOON):
                return _ended(files, runs[run], reason)
        return Observation(
            phase=Phase.EXITED,
            exit_code=files.exit_code(),
            evidence=f"SLURM knows its job {holder.slurm_id} no more",
        )

    def _runs(self, holder: Holder, name: str) -> bool:
        job = self._client.find(holder.slurm_id, name)
        if job is None:
            return False
        try:
            return standing(job.state)[0] is Standing.RUNNING
        except UnknownState as error:
            raise LauncherUnavailable(str(error)) from error

    def _name_of(self, launcher_id: str, holder: Holder) -> str:
        return job_name(_job_id(launcher_id), holder.first)

    def _files(self, launcher_id: str) -> AttemptFiles:
        attempt = int(launcher_id.rpartition("-")[2])
        return AttemptFiles(self._jobs_dir / _job_id(launcher_id), attempt)


def _job_id(launcher_id: str) -> str:
    return launcher_id.removeprefix("planish-").rpartition("-")[0]


def _ended(files: AttemptFiles, job: SlurmJob, reason: Reason | None) -> Observation:
    evidence = str(job)
    failed = bool(job.exit_code or job.exit_signal)
    if reason is Reason.CANCELLED and job.why == "DependencyNeverSatisfied":
        reason = Reason.USER_ERROR
        evidence += ": a job of `resources.slurm.after` did not end well"
    elif reason is None and failed and ran_out_of_memory(files.last_words()):
        reason = Reason.OUT_OF_MEMORY
        evidence += ": it took more memory than `resources.memory_gib_per_node`"
    return Observation(
        phase=Phase.EXITED,
        exit_code=job.exit_code,
        exit_signal=job.exit_signal,
        reason=reason,
        evidence=evidence,
    )
