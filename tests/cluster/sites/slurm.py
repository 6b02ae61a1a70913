"""SLURM as a site: slurmctld and a slurmd for each of two made-up machines, all on this one.

../shared/cluster/slurm-up.sh starts them, as root. Its machines get more memory and a longer
KillWait here: real workers need both.
"""

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service.launchers.slurm.config import SlurmCluster
from tests.cluster.sites.site import DRIVER, Ability, Patience, Site
from tests.waiting import wait_until

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "setpriv")
ACCOUNTING = ("sacct", "slurmdbd", "mariadbd")
SHARED = Path(__file__).parents[4] / "shared" / "cluster"
MEMORY_MIB, KILL_WAIT_SECONDS = 9000, 10
PAUSE_SECONDS = 0.1
"""Between two commands of SLURM, each of which is a process."""


class Slurm:
    """A SLURM of our own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._port = port
        # What a shell that is in a job of some SLURM has set would lead the commands astray.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment = {**kept, "SLURM_CONF": str(self.conf), "PORT": str(port)}

    def up(self, nodes: int, *, accounting: bool = False) -> None:
        script = (SHARED / "slurm-up.sh").read_text()
        changed = script.replace("RealMemory=2000", f"RealMemory={MEMORY_MIB}")
        changed = changed.replace("KillWait=2\n", f"KillWait={KILL_WAIT_SECONDS}\n")
        # Its commands wait half as long again for a slurmctld that is away.
        changed = changed.replace("SlurmctldTimeout=6", "SlurmctldTimeout=2")
        # Its own patience is for a machine with nothing else to do.
        changed = changed.replace("seq 1 100)", "seq 1 900)").replace("seq 1 200)", "seq 1 900)")
        assert changed.count(f"={MEMORY_MIB}") == 1
        assert changed.count("seq 1 900)") == 3
        environment = self.environment | ({"DBD": "1"} if accounting else {})
        subprocess.run(
            ["bash", "-s", str(self.folder), str(nodes)],
            input=changed,
            env=environment,
            check=True,
            text=True,
            timeout=400,
        )

    def down(self) -> None:
        script = str(SHARED / "slurm-down.sh")
        subprocess.run(
            ["bash", script, str(self.folder)], env=self.environment, check=False, timeout=60
        )

    def run(self, *command: str, check: bool = True) -> str:
        """The output of one of SLURM's commands."""
        ran = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or ran.returncode == 0, (command, ran.stderr)
        return ran.stdout.strip()

    def state(self, job: str) -> str:
        """One word, as `RUNNING`."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def wait_for(self, job: str, *, running: bool) -> None:
        """Until the job runs, or until it does not."""
        wait_until(
            lambda: (self.state(job) == "RUNNING") is running,
            f"job {job} runs" if running else f"job {job} runs no more",
            details=lambda: self.state(job),
            pause=PAUSE_SECONDS,
        )

    def start_controller(self) -> None:
        subprocess.run(
            ["slurmctld", "-f", str(self.conf)], env=self.environment, check=True, timeout=60
        )
        wait_until(
            lambda: "UP" in self.run("scontrol", "ping", check=False).replace("DOWN", ""),
            "slurmctld is up",
            pause=PAUSE_SECONDS,
        )


class SlurmSite(Site):
    """Two machines with 4 cores each."""

    kind = "slurm"
    patience = Patience(start=60, end=60, again=90)

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder = folder
        self.slurm = slurm
        self.cluster = SlurmCluster(
            python=str(DRIVER),
            partition="batch",
            slurm_conf=str(slurm.conf),
            poll_seconds=0.2,
            command_seconds=30,
        )
        self.resources = {"cluster": "slurm", "cpus_per_node": 1, "memory_gib_per_node": 0.125}
        self.cannot: dict[Ability, str] = {}

    @contextmanager
    def fill(self) -> Iterator[None]:
        job = self._occupy("batch", seconds=600)
        self.slurm.wait_for(job, running=True)
        try:
            yield
        finally:
            self.slurm.run("scancel", job)

    def preempt(self, launcher_id: str) -> None:
        """A job of a higher partition takes all machines, for a short time."""
        job = self._job_of(launcher_id)
        self._occupy("high", seconds=2)
        self.slurm.wait_for(job, running=False)

    def lose_node(self, launcher_id: str) -> None:
        """The machine is declared down; as its slurmd answers, SLURM takes it back by itself."""
        job = self._job_of(launcher_id)
        node = self.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%B")
        self.slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        self.slurm.wait_for(job, running=False)

    @contextmanager
    def away(self) -> Iterator[None]:
        """slurmctld is stopped; the jobs run on under their slurmd."""
        self.slurm.run("scontrol", "shutdown", "slurmctld")
        wait_until(lambda: not _listens(self.slurm._port), "slurmctld is gone")
        try:
            yield
        finally:
            self.slurm.start_controller()

    def _occupy(self, partition: str, *, seconds: int) -> str:
        options = [f"--partition={partition}", "--nodes=2", "--exclusive", "--output=/dev/null"]
        return self.slurm.run("sbatch", "--parsable", *options, f"--wrap=sleep {seconds}")

    def _job_of(self, launcher_id: str) -> str:
        listed = self.slurm.run(
            "squeue", "--noheader", f"--name={launcher_id}", "--states=all", "--format=%i"
        )
        return max(listed.split(), key=int)


def missing(*, accounting: bool = False) -> str | None:
    """Why no SLURM can be started here; null where one can."""
    wanted = (*PROGRAMS, *ACCOUNTING) if accounting else PROGRAMS
    absent = [name for name in wanted if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: scripts/cluster_packages.sh installs SLURM"
    if os.geteuid() != 0:
        return "slurm-up.sh has to be run as root"
    if not (SHARED / "slurm-up.sh").exists():
        return f"no {SHARED}/slurm-up.sh"
    return None


@contextmanager
def slurm_up(folder: Path, nodes: int = 2, *, accounting: bool = False) -> Iterator[Slurm]:
    """A SLURM that is up inside the block."""
    reason = missing(accounting=accounting)
    if reason is not None:
        pytest.skip(reason)
    slurm = Slurm(folder / "slurm", _free_ports())
    try:
        slurm.up(nodes, accounting=accounting)
        yield slurm
    finally:
        slurm.down()


def open_site(folder: Path) -> Iterator[Site]:
    with slurm_up(folder) as slurm:
        yield SlurmSite(folder, slurm)


def _free_ports() -> int:
    """The first of the ports that slurm-up.sh counts up from, all free just now."""
    while True:
        first = random.randrange(20000, 32000)
        if not any(_listens(first + offset) for offset in (0, 2, 3, 101, 102, 103)):
            return first


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
