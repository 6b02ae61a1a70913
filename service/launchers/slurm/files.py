"""What the launcher and its batch scripts leave in an attempt's folder.

attempts/N/slurm.lock       held while N is submitted, by sbatch too: a killed service does not
                            leave an sbatch behind that the next one does not wait for
attempts/N/slurm.json       the job of SLURM that runs attempt N, and the attempt that it was
                            submitted as; they differ where SLURM queued it again
attempts/N/slurm_job        the same two, by the script itself, when it took the attempt. It goes
                            before slurm.json, which a killed service did not write, and which names
                            the other job where two were submitted
attempts/N/slurm_cancelled  attempt N must not begin, nor may the job that was submitted as it run
                            any more
attempts/N/slurm_exit       the exit code of the script's srun
attempts/N/job.sbatch       the script, for people
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.jobs.folder import JobFolder
from service.launchers.protocol import LauncherUnavailable
from service.spec.durable import fsync_file, replace_text
from service.spec.fence import exclusive_lock

_LOCK_SECONDS = 1.0
_LOG_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The job of SLURM that runs an attempt."""

    slurm_id: int
    first: int
    """The attempt that it was submitted as."""


class AttemptFiles:
    """The launcher's files of one attempt."""

    def __init__(self, job_dir: Path, attempt: int) -> None:
        self.attempt = attempt
        self._job = JobFolder(job_dir)
        self._folder = self._job.attempt(attempt).path

    def make(self) -> None:
        """Makes the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Nobody else submits this attempt inside the block; the lock's descriptor.

        Raises:
            LauncherUnavailable: somebody is at it.
        """
        with ExitStack() as held:
            lock = exclusive_lock(self._folder / "slurm.lock", wait_seconds=_LOCK_SECONDS)
            try:
                descriptor = held.enter_context(lock)
            except TimeoutError as error:
                raise LauncherUnavailable(
                    f"attempt {self.attempt} is just being submitted by another process"
                ) from error
            yield descriptor

    def holder(self) -> Holder | None:
        """The job of SLURM that runs the attempt, where one is known.

        Where two were submitted, since an answer was lost, it is the one that took the attempt.

        Raises:
            LauncherUnavailable: what is written there cannot be read.
        """
        return self._claimed() or self._recorded()

    def _recorded(self) -> Holder | None:
        try:
            found = json.loads((self._folder / "slurm.json").read_text(encoding="ascii"))
            return Holder(slurm_id=int(found["slurm_id"]), first=int(found["first"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise LauncherUnavailable(f"{self._folder}/slurm.json is damaged: {error}") from error

    def _claimed(self) -> Holder | None:
        try:
            text = (self._folder / "slurm_job").read_text(encoding="ascii")
        except FileNotFoundError:
            return None
        numbers = text.split()
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise LauncherUnavailable(f"{self._folder}/slurm_job is damaged: {text!r}")
        return Holder(slurm_id=int(numbers[0]), first=int(numbers[1]))

    def record(self, holder: Holder) -> None:
        """Writes down who runs the attempt."""
        text = json.dumps({"slurm_id": holder.slurm_id, "first": holder.first})
        replace_text(self._folder / "slurm.json", text + "\n")

    def keep_script(self, script: str) -> None:
        """Keeps the batch script, for people."""
        replace_text(self._folder / "job.sbatch", script)

    def cancel(self, first: int) -> None:
        """The job that was submitted as attempt `first` must not run any more."""
        folder = self._job.attempt(first).path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "slurm_cancelled").touch()
        fsync_file(folder)

    def cancelled(self, first: int) -> bool:
        """Whether `cancel` was called."""
        return (self._job.attempt(first).path / "slurm_cancelled").exists()

    def exit_code(self) -> int | None:
        """Of the script's srun; null where it did not get so far."""
        try:
            text = (self._folder / "slurm_exit").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def last_words(self) -> str:
        """The end of the attempt's log, where SLURM's own words are too."""
        try:
            with (self._folder / "log").open("rb") as log:
                log.seek(max(0, log.seek(0, 2) - _LOG_TAIL_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
