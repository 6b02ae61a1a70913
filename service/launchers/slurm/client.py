"""SLURM's commands, as the launcher asks them.

Who knows what of a job: slurmctld, as long as the job lives and for MinJobAge (300 s) after it,
which squeue and scontrol print; the accounting database, for ever, which sacct prints and which not
every cluster has. One squeue a poll interval serves all jobs, so a service with hundreds of them is
no burden to slurmctld.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from service.launchers.protocol import LaunchError, LauncherUnavailable
from service.launchers.slurm.answers import (
    SlurmJob,
    UnreadableAnswer,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
)
from service.launchers.slurm.tunnel import Ran, Tunnel

_log = logging.getLogger(__name__)

_NO_ANSWER = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "communication connection failure",
    "connection timed out",
    "unable to connect",
    "zero bytes were transmitted",
    "standby mode",
    "resource temporarily unavailable",
    "temporarily unable to accept job",
    "slurmctld is not responding",
    "unexpected message received",
    "error from slurmctld",
    "could not establish a configuration source",
    "protocol authentication error",
    "munge",
)
"""What SLURM's commands say where slurmctld is away or busy: the job may be accepted or not."""


class SlurmClient:
    """What the launcher wants of SLURM."""

    def __init__(self, tunnel: Tunnel, *, bin: str | None, seconds: float) -> None:
        """Asks nothing yet.

        Args:
            tunnel: the way there.
            bin: folder of the commands; null finds them in PATH.
            seconds: how old an answer about the queue may be.
        """
        self._tunnel = tunnel
        self._bin = bin
        self._seconds = seconds
        self._lock = threading.Lock()
        self._queue: Mapping[int, SlurmJob] = {}
        self._asked_at = float("-inf")

    def submit(self, script: str, *, keep: int) -> int:
        """Hands a batch script to SLURM; the new job's id.

        Args:
            script: its text.
            keep: a descriptor that sbatch holds open until it ends.

        Raises:
            LaunchError: SLURM does not take it.
            LauncherUnavailable: no answer; it may have been taken.
        """
        ran = self._tunnel.run([self._command("sbatch"), "--parsable"], text=script, keep=keep)
        with self._lock:
            self._asked_at = float("-inf")  # the queue has changed
        if ran.code:
            complaint = ran.errors.strip() or ran.output.strip() or f"exit code {ran.code}"
            if _is_no_answer(ran):
                raise LauncherUnavailable(f"sbatch: {complaint}")
            raise LaunchError(f"SLURM does not take the job: {complaint}")
        number, _, elsewhere = ran.output.strip().partition(";")
        if elsewhere:  # squeue here does not print the jobs of another cluster
            raise LaunchError(
                f"sbatch gave the job to the cluster {elsewhere!r}, as its job {number}: "
                "unset SBATCH_CLUSTERS there; federations are not supported"
            )
        if not number.isdecimal():
            raise LauncherUnavailable(f"sbatch printed {ran.output!r} where a job's id should be")
        return int(number)

    def find(self, slurm_id: int, name: str) -> SlurmJob | None:
        """The job, as slurmctld knows it; null where it knows it no more.

        Args:
            slurm_id: its id.
            name: its name; ids begin anew where a cluster is set up again.

        Raises:
            LauncherUnavailable: no answer.
        """
        found = self._fresh_queue().get(slurm_id) or self._show(slurm_id)
        return found if found is not None and found.name == name else None

    def find_named(self, name: str) -> SlurmJob | None:
        """The newest job of that name that slurmctld knows; asked now.

        Raises:
            LauncherUnavailable: no answer.
        """
        with self._lock:
            self._ask()
            found = [job for job in self._queue.values() if job.name == name]
        return max(found, key=lambda job: job.id, default=None)

    def runs(self, slurm_id: int, name: str) -> Sequence[SlurmJob]:
        """Each run of a job, from accounting, in order; empty where there is none."""
        command = [self._command("sacct"), "--json", "--duplicates", f"--jobs={slurm_id}"]
        ran = self._tunnel.run(command)
        if ran.code:
            _log.debug("sacct: %s", ran.errors.strip())
            return ()
        try:
            return [run for run in parse_sacct(ran.output, slurm_id) if run.name == name]
        except UnreadableAnswer as error:
            _log.warning("%s", error)
            return ()

    def end(self, slurm_id: int, name: str) -> None:
        """Has SLURM end a job: TERM to all of it, KILL after KillWait; it is not queued again.

        Args:
            slurm_id: its id.
            name: its name; another job that has this id meanwhile is left alone.

        Raises:
            LauncherUnavailable: no answer.
        """
        self._cancel([f"--name={name}", str(slurm_id)])

    def tell(self, slurm_id: int, name: str) -> None:
        """Sends USR1 to a running job's batch script, which hands it on to the driver.

        Args:
            slurm_id: its id.
            name: its name; another job that has this id meanwhile is left alone.

        Raises:
            LauncherUnavailable: no answer.
        """
        self._cancel(["--batch", "--signal=USR1", f"--name={name}", str(slurm_id)])

    def _cancel(self, arguments: Sequence[str]) -> None:
        ran = self._tunnel.run([self._command("scancel"), *arguments])
        with self._lock:
            self._asked_at = float("-inf")
        if ran.code and _is_no_answer(ran):
            raise LauncherUnavailable(f"scancel: {ran.errors.strip()}")
        if ran.code:
            _log.info("scancel: %s", ran.errors.strip())  # it has ended meanwhile

    def _fresh_queue(self) -> Mapping[int, SlurmJob]:
        with self._lock:
            if time.monotonic() - self._asked_at >= self._seconds:
                self._ask()
            return self._queue

    def _ask(self) -> None:
        asked_at = time.monotonic()
        ran = self._tunnel.run([self._command("squeue"), "--json", "--states=all", "--me"])
        if ran.code:
            raise LauncherUnavailable(f"squeue: {ran.errors.strip() or f'exit code {ran.code}'}")
        try:
            self._queue = {job.id: job for job in parse_squeue(ran.output)}
        except UnreadableAnswer as error:
            raise LauncherUnavailable(str(error)) from error
        self._asked_at = asked_at

    def _show(self, slurm_id: int) -> SlurmJob | None:
        """A job that squeue does not print, for whatever reason: a second witness."""
        ran = self._tunnel.run(
            [self._command("scontrol"), "--oneliner", "show", "job", str(slurm_id)]
        )
        if ran.code:
            if "invalid job id" in ran.errors.lower():
                return None
            raise LauncherUnavailable(f"scontrol: {ran.errors.strip()}")
        try:
            return parse_scontrol(ran.output)
        except UnreadableAnswer as error:
            raise LauncherUnavailable(str(error)) from error

    def _command(self, name: str) -> str:
        return name if self._bin is None else f"{self._bin}/{name}"


def _is_no_answer(ran: Ran) -> bool:
    said = ran.errors.lower()
    return any(words in said for words in _NO_ANSWER)
