"""What an operator says about a SLURM cluster.

    clusters:
      a100:
        type: slurm
        partition: gpu
        python: /shared/planish/venv/bin/python
        setup: module load cuda
        tunnel: {type: ssh, host: login.example.org, user: planish, identity: /etc/planish/key,
                 nemo_run_python: /opt/nemo-run/bin/python}

The operator is trusted with shell lines (`setup`) and options of sbatch; a job document never is.
"""

import re
import string
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, StringConstraints, field_validator

from service.launchers.cluster import (
    RESERVED_PREFIX,
    ClusterPart,
    RemoteCluster,
    Site,
    VariableName,
)
from service.spec.resources import SlurmExpression, SlurmWord

if TYPE_CHECKING:
    from service.launchers.slurm.launcher import SlurmLauncher

Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4096)]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=4096)]

_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f\x7f]*)?")
_OURS = frozenset(
    {"array", "begin", "chdir", "cluster-constraint", "clusters", "comment", "cpus-per-task"}
    | {"dependency", "error", "export", "export-file", "get-user-env", "gpus-per-node", "hold"}
    | {"input", "job-name", "mem", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"}
    | {"parsable", "requeue", "no-requeue", "signal", "test-only", "time", "uid", "wait", "wrap"}
)
_BEGIN_AS_OURS = frozenset({"gpus"})
"""Options that are the beginning of one of ours and yet not short for it."""
_RESERVED_PREFIXES = (RESERVED_PREFIX, "SLURM_", "RAY_AUTH_")


def _ours(name: str) -> str | None:
    """The option of the launcher that sbatch reads in a name, which may be cut short."""
    if name in _BEGIN_AS_OURS:
        return None
    return min((ours for ours in sorted(_OURS) if ours.startswith(name)), key=len, default=None)


class PyxisContainer(ClusterPart):
    """Jobs run in a container that NVIDIA's SLURM plugin Pyxis starts."""

    type: Literal["pyxis"]
    image: Line
    """As Pyxis takes it: `nvcr.io#nvidia/pytorch:25.01-py3`, or a .sqsh file."""
    mounts: list[Line] = Field(default_factory=list)
    """Folders, as `/shared:/shared`; the jobs' folders are always mounted."""


class ApptainerContainer(ClusterPart):
    """Jobs run in a container of Apptainer (Singularity)."""

    type: Literal["apptainer"]
    image: Line
    """A .sif file, or an address that Apptainer takes."""
    mounts: list[Line] = Field(default_factory=list)
    """Folders, as `/shared:/shared`; the jobs' folders are always mounted."""
    nvidia: bool = True
    """The host's NVIDIA driver is made visible where a job has GPUs (`--nv`)."""


class LocalTunnelConfig(ClusterPart):
    """The service runs where SLURM's commands are."""

    type: Literal["local"] = "local"


class NemoRunTunnelConfig(ClusterPart):
    """The service runs where SLURM's commands are, and NeMo-Run's LocalTunnel starts them."""

    type: Literal["nemo_run"]
    nemo_run_python: AbsolutePath
    """Interpreter of an environment with NeMo-Run (`scripts/nemo_run_env.sh DIR` makes it)."""


class SshTunnelConfig(ClusterPart):
    """SLURM's commands are run on a login node, by NeMo-Run's SSHTunnel."""

    type: Literal["ssh"]
    host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$")]
    """Login node."""
    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._@-]*$")]
    """Account there; jobs run as it, so it must be the service's own user, with the same uid."""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    """Port of its sshd."""
    identity: AbsolutePath
    """File of the private key; without a passphrase, since nobody is there to type it."""
    nemo_run_python: AbsolutePath
    """Interpreter of an environment with NeMo-Run (`scripts/nemo_run_env.sh DIR` makes it)."""


class SlurmCluster(RemoteCluster):
    """A SLURM cluster."""

    type: Literal["slurm"] = "slurm"

    partition: SlurmExpression | None = None
    """For jobs that name none; null leaves it to SLURM. So with the next five."""
    account: SlurmWord | None = None
    """For jobs that name none."""
    qos: SlurmWord | None = None
    """For jobs that name none."""
    reservation: SlurmWord | None = None
    """For jobs that name none."""
    constraint: SlurmExpression | None = None
    """For jobs that name none."""
    gres: SlurmExpression | None = None
    """For jobs that name none and want GPUs; null asks for `gpus_per_node` of them."""
    memory_gib_per_node: PositiveFloat | None = None
    """Memory of each machine in GiB where a job does not say; null leaves it to SLURM."""
    options: list[Line] = Field(default_factory=list)
    """More options of sbatch for every job, each as `--option=value`."""

    python: Line = "python3"
    """The workers' interpreter, in which Planish is installed; in a container, inside it."""
    env: dict[VariableName, str] = Field(default_factory=dict)
    """Variables of every job, as they are: nothing in them is expanded. They are in the batch
    script, which others may read: no secrets."""
    setup: str = ""
    """Lines of bash that run on the first machine before the job starts, as `module load cuda`. A
    file with secrets is read here: `set -a; . /home/planish/storage.env; set +a`."""
    container: (
        Annotated[PyxisContainer | ApptainerContainer, Field(discriminator="type")] | None
    ) = None
    """Null runs the interpreter as it is on the machines."""

    signal_seconds: Annotated[int, Field(ge=1, le=65535)] | None = None
    """So long before SLURM's time limit the driver is told to save and end; null: the job's
    `faults.grace_seconds` and 60 seconds more (SLURM looks at limits every 30)."""
    grace_seconds: NonNegativeFloat = 30.0
    """How long SLURM lets those live that it ends: its `KillWait`, or the `GraceTime` of what is
    preempted where that is longer."""
    requeue_seconds: NonNegativeFloat = 60.0
    """A preempted job, or one that lost a machine, is waited for so long to be queued again."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the first machine on which the driver serves metrics; 0 takes a free one, which the
    attempt's log names; null serves none."""

    tunnel: Annotated[
        LocalTunnelConfig | NemoRunTunnelConfig | SshTunnelConfig, Field(discriminator="type")
    ] = LocalTunnelConfig()
    """How SLURM's commands are reached."""
    bin: AbsolutePath | None = None
    """Folder of SLURM's commands, where they are not in PATH."""
    slurm_conf: AbsolutePath | None = None
    """Value of SLURM_CONF for the commands; null leaves it as it is."""
    command_seconds: PositiveFloat = 60.0
    """How long one command may take."""
    poll_seconds: Annotated[float, Field(ge=0.1)] = 5.0
    """How often SLURM is asked, once for all jobs."""

    @field_validator("options")
    @classmethod
    def _known_form(cls, options: list[str]) -> list[str]:
        for option in options:
            match = _OPTION.fullmatch(option)
            if match is None:
                raise ValueError(f"{option!r} is no option of sbatch: write --option=value")
            ours = _ours(match[1])
            if ours is not None:
                raise ValueError(f"--{ours} is set by the launcher; remove {option!r}")
        return options

    @field_validator("env")
    @classmethod
    def _plain(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if name.startswith(_RESERVED_PREFIXES):
                raise ValueError(f"{name} is set by the launcher or by SLURM; remove it")
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a NUL, which no variable can")
        return env

    @field_validator("setup")
    @classmethod
    def _printable(cls, setup: str) -> str:
        if any(char not in string.printable and not char.isprintable() for char in setup):
            raise ValueError("it holds characters that cannot be printed")
        return setup

    def open(self, site: Site) -> "SlurmLauncher":
        """The launcher."""
        from service.launchers.slurm.launcher import open_launcher

        return open_launcher(self, site.jobs_dir, site.data_roots)
