"""Runs drivers as processes of this machine (Linux).

An attempt's driver leads a session and process group of its own, so it outlives the service, and
its folder holds `process.json` (pid, start time, boot), which the driver's process makes itself,
before it becomes the driver; see `claim_and_exec`. A service that comes back finds the driver by
that file, and everything that came out of it by the marks in its environment.

How a driver exited is known only to the service process that started it; after a restart the exit
code is null and `outcome.json` must tell.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from service.jobs.folder import AttemptFolder, JobFolder
from service.launchers.cluster import ClusterConfig, Count, Site
from service.launchers.environment import driver_environment
from service.launchers.gpus import compute_capability, count_gpus
from service.launchers.processes import Process, group_of, is_alive, marked, send
from service.launchers.protocol import (
    LaunchError,
    LauncherUnavailable,
    LaunchRequest,
    Observation,
    Phase,
    Submission,
    only_for,
)
from service.settings import Settings
from service.spec import JobSpec
from service.validation.problems import FieldProblem

DRIVER = (sys.executable, "-m", "megatron_backend")
_CLAIM_AND_EXEC = Path(__file__).with_name("claim_and_exec.py")
_START_SECONDS = 10.0


class LocalCluster(ClusterConfig):
    """This machine."""

    type: Literal["local"] = "local"
    max_jobs: Count | None = Settings.model_fields["max_local_jobs"].default
    """How many jobs run at once; the others wait in the queue. Null sets no limit."""

    def open(self, site: Site) -> "LocalLauncher":
        """The launcher."""
        return LocalLauncher(site.jobs_dir, capacity=self.max_jobs, data_roots=site.data_roots)


class LocalLauncher:
    """Launches on this machine, `capacity` jobs at once."""

    def __init__(
        self,
        jobs_dir: Path,
        *,
        capacity: int | None = 1,
        data_roots: Sequence[Path] = (),
        gpus: int | None = None,
        capability: tuple[int, int] | None = None,
        command: Sequence[str] = DRIVER,
        poll_seconds: float = 0.2,
    ) -> None:
        """Takes drivers from now on, and knows those that an earlier service process started.

        Args:
            jobs_dir: the folder that holds the jobs' folders, each under its job's id.
            capacity: how many jobs run at once; null sets no limit.
            data_roots: folders that environments may read files from.
            gpus: how many GPUs this machine has; null counts them.
            capability: their CUDA compute capability; null asks their driver.
            command: started as `COMMAND... JOB_DIR --attempt N`.
            poll_seconds: how often it is worth asking.
        """
        self.capacity = capacity
        self.nodes: int | None = 1
        self.gpus_per_node: int | None = count_gpus(os.environ) if gpus is None else gpus
        self.compute_capability = capability
        if capability is None and self.gpus_per_node:
            self.compute_capability = compute_capability()
        self.poll_seconds = poll_seconds
        self._jobs_dir = jobs_dir.resolve()
        self.data_roots = tuple(data_roots)
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._children: dict[str, int] = {}
        self._exits: dict[str, int] = {}
        self._asked: dict[str, frozenset[Process]] = {}

    def check(self, spec: JobSpec) -> Sequence[FieldProblem]:
        """This machine has no options of its own; its size is checked for every cluster."""
        return only_for(spec, none_of=("slurm", "kubernetes"), kind="local")

    def preview(self, _request: LaunchRequest) -> Submission | None:
        """Nothing is handed over."""
        return None

    def identify(self, job_id: str, attempt: int) -> str:
        """`JOB_ID/ATTEMPT`."""
        return f"{job_id}/{attempt}"

    def submit(self, request: LaunchRequest) -> None:
        """Starts the driver and waits (some 30 ms) until it has taken the attempt.

        Raises:
            LaunchError: there is no such command, or no process could be made.
            LauncherUnavailable: the new process took too long; ask again.
        """
        launcher_id = self.identify(request.job_id, request.attempt)
        folder = self._folder(launcher_id)
        self._reap(launcher_id)
        if _record_path(folder).exists():
            return
        if launcher_id in self._children:
            raise LauncherUnavailable(f"{launcher_id} is still about to start")
        folder.path.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as answer:
            try:
                pid = self._spawn(request, folder, writing)
            except OSError as error:
                raise LaunchError(f"no process could be made for {launcher_id}: {error}") from error
            finally:
                os.close(writing)
            with self._lock:
                self._children[launcher_id] = pid
            complaint = _read_all(answer.fileno(), launcher_id)
        if complaint:
            raise LaunchError(f"the driver could not be started: {complaint}")
        process = _read_record(folder)
        if process is None:
            raise LaunchError(f"the driver could not be started; see {folder.log_path}")
        if process.pid != pid:
            # Another process had the attempt; ours left at once.
            with self._lock:
                del self._children[launcher_id]
            os.waitpid(pid, 0)

    def poll(self, launcher_id: str) -> Observation:
        """Looks for the attempt's processes."""
        folder = self._folder(launcher_id)
        if not _record_path(folder).exists():
            return Observation(phase=Phase.UNKNOWN, evidence="it was never started here")
        process = _read_record(folder)
        if process is not None and is_alive(process):
            return Observation(phase=Phase.RUNNING, evidence=f"process {process.pid} lives")
        self._reap(launcher_id)  # not before: it may have ended since
        leftovers = len(self._processes(launcher_id, process))
        if process is None:
            return Observation(
                phase=Phase.EXITED, leftovers=leftovers, evidence="it was shut out before it began"
            )
        evidence = f"process {process.pid} has ended, {leftovers} of its children are left"
        status = self._exits.get(launcher_id)
        if status is None:
            return Observation(phase=Phase.EXITED, leftovers=leftovers, evidence=evidence)
        code = os.waitstatus_to_exitcode(status)
        return Observation(
            phase=Phase.EXITED,
            exit_code=code if code >= 0 else None,
            exit_signal=-code if code < 0 else None,
            leftovers=leftovers,
            evidence=evidence,
        )

    def cancel(self, launcher_id: str, grace_seconds: float) -> None:
        """TERM to the driver, once; KILL to all that is left when the grace is over.

        Its children get no TERM. Ray's daemons would obey it at once and take the driver down with
        them, before it could end its ranks and write its outcome.
        """
        self._reap(launcher_id)
        folder = self._folder(launcher_id)
        _shut_out(folder)
        process = _read_record(folder)
        targets = self._processes(launcher_id, process)
        if grace_seconds <= 0:
            for target in targets:
                send(target, signal.SIGKILL)
        elif launcher_id not in self._asked and process is not None:
            send(process, signal.SIGTERM)
        with self._lock:
            self._asked[launcher_id] = targets

    def close(self) -> None:
        """Drivers are not this process's to end."""

    def _spawn(self, request: LaunchRequest, folder: AttemptFolder, pipe: int) -> int:
        arguments = [*self._command, str(request.job_dir), "--attempt", str(request.attempt)]
        record = str(_record_path(folder))
        with folder.log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CLAIM_AND_EXEC), record, str(pipe), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=request.job_dir,
                env=driver_environment(
                    os.environ,
                    request.job_id,
                    request.attempt,
                    self.data_roots,
                    storage=request.context.spec.checkpoint.storage is not None,
                ),
                start_new_session=True,
                pass_fds=(pipe,),
            )
        # The driver may outlive this object; it is waited for in `_reap`, by its pid.
        process.returncode = 0
        return process.pid

    def _reap(self, launcher_id: str) -> None:
        with self._lock:
            pid = self._children.get(launcher_id)
            if pid is None:
                return
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._exits[launcher_id] = status
                del self._children[launcher_id]

    def _processes(self, launcher_id: str, leader: Process | None) -> frozenset[Process]:
        job_id, _, attempt = launcher_id.rpartition("/")
        found = set(marked(job_id, int(attempt)))
        if leader is not None:
            found.update(group_of(leader))
        # Those that scrubbed their environment were seen in the group while its leader lived.
        with self._lock:
            known = self._asked.get(launcher_id, frozenset())
        found.update(filter(is_alive, known))
        return frozenset(found)

    def _folder(self, launcher_id: str) -> AttemptFolder:
        job_id, _, attempt = launcher_id.rpartition("/")
        return JobFolder(self._jobs_dir / job_id).attempt(int(attempt))


def _record_path(folder: AttemptFolder) -> Path:
    return folder.path / "process.json"


def _read_record(folder: AttemptFolder) -> Process | None:
    """The process that took the attempt; null where none did or `cancel` shut it out."""
    try:
        found = json.loads(_record_path(folder).read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    return None if found is None else Process(**found)


def _shut_out(folder: AttemptFolder) -> None:
    """Takes an attempt that nobody has taken, so that no process ever can."""
    record = _record_path(folder)
    if record.exists():
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    offer = record.with_name(f"{record.name}.{secrets.token_hex(8)}")
    offer.write_text("null\n", encoding="ascii")
    try:
        os.link(offer, record)
    except FileExistsError:
        return
    finally:
        offer.unlink()


def _read_all(descriptor: int, launcher_id: str) -> str:
    """All that comes through a pipe until its other end is closed."""
    deadline = time.monotonic() + _START_SECONDS
    received = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise LauncherUnavailable(f"{launcher_id} did not start within {_START_SECONDS:g} s")
        part = os.read(descriptor, 4096)
        if not part:
            return received.decode(errors="replace")
        received += part
