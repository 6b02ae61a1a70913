"""SLURM's commands as a script of answers, where a real slurmctld could not be made to say such."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.launchers.protocol import LauncherUnavailable
from service.launchers.slurm.client import SlurmClient
from service.launchers.slurm.config import SlurmCluster
from service.launchers.slurm.launcher import SlurmLauncher
from service.launchers.slurm.tunnel import Ran

JOB = "job-0123456789abcdef"
FIRST, SECOND = f"planish-{JOB}-1", f"planish-{JOB}-2"


class ScriptedSlurm:
    """A tunnel to a SLURM whose jobs have the states that a test gives them."""

    def __init__(self) -> None:
        self.jobs: dict[int, dict[str, Any]] = {}
        self.accounting: list[dict[str, Any]] | None = None
        """What sacct tells; null is no accounting."""
        self.away = False
        self.submitted: list[str] = []
        """Scripts, in order."""
        self.refuse = ""
        """What sbatch says in place of an id."""
        self.elsewhere = ""
        """The cluster that sbatch gives jobs to, where it is another one."""
        self.lose_answer = False
        """sbatch takes the job, and its answer is lost."""
        self.cancelled: list[list[str]] = []
        """Arguments of scancel."""
        self.refuse_cancel = ""
        """What scancel says in place of doing it."""

    def run(self, command: Sequence[str], *, text: str = "", keep: int | None = None) -> Ran:
        del keep
        if self.away:
            return Ran(code=1, output="", errors="slurm_load_jobs error: Unable to contact slurm "
                       "controller (connect failure)")  # fmt: skip
        return getattr(self, f"_{command[0]}")(list(command[1:]), text)

    def close(self) -> None:
        pass

    def set(self, slurm_id: int, state: object, **fields: Any) -> None:
        """The job's state from now on."""
        self.jobs[slurm_id] |= {"job_state": state, **fields}

    def _sbatch(self, _: list[str], text: str) -> Ran:
        if self.refuse:
            return Ran(code=1, output="", errors=f"sbatch: error: {self.refuse}\n")
        self.submitted.append(text)
        slurm_id = 100 + len(self.submitted)
        if self.elsewhere:
            return Ran(code=0, output=f"{slurm_id};{self.elsewhere}\n", errors="")
        (line,) = [row for row in text.splitlines() if row.startswith("#SBATCH --job-name=")]
        self.jobs[slurm_id] = {
            "job_id": slurm_id,
            "name": line.partition("=")[2],
            "job_state": "PENDING",
            "restart_cnt": 0,
            "requeue": True,
            "exit_code": 0,
        }
        if self.lose_answer:
            raise LauncherUnavailable("sbatch gave no answer within 60 s")
        return Ran(code=0, output=f"{slurm_id}\n", errors="")

    def _squeue(self, _: list[str], __: str) -> Ran:
        return Ran(code=0, output=json.dumps({"jobs": list(self.jobs.values())}), errors="")

    def _scontrol(self, _: list[str], __: str) -> Ran:
        return Ran(code=1, output="", errors="slurm_load_jobs error: Invalid job id specified\n")

    def _sacct(self, _: list[str], __: str) -> Ran:
        if self.accounting is None:
            return Ran(code=1, output="", errors="Slurm accounting storage is disabled\n")
        return Ran(code=0, output=json.dumps({"jobs": self.accounting}), errors="")

    def _scancel(self, arguments: list[str], _: str) -> Ran:
        if self.refuse_cancel:
            return Ran(code=1, output="", errors=f"scancel: error: {self.refuse_cancel}\n")
        self.cancelled.append(arguments)
        return Ran(code=0, output="", errors="")


def launcher_of(slurm: ScriptedSlurm, jobs_dir: Path, **options: Any) -> SlurmLauncher:
    """A launcher whose commands the script answers, and which asks anew each time."""
    cluster = SlurmCluster(**options)
    client = SlurmClient(slurm, bin=None, seconds=0.0)
    return SlurmLauncher(cluster, jobs_dir, (), client=client, tunnel=slurm)
