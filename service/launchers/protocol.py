"""The contract of a launcher.

A launcher starts each (job, attempt) at most once, ever. The id under which it knows an attempt is
derived from the two, so it is known before anything is started, and whoever asks a second time,
after a crash or from another process, finds the first start.

No call waits for a driver: the reconciler calls again until it sees what it wants.

Where there is a cluster behind it, three more things hold:

- Every word that the cluster has for a state is mapped (`Phase`); a word that is not known is never
  taken for an end. It is logged, and `poll` raises `LauncherUnavailable`: nothing may be concluded.
- What the cluster says about an end is kept as `Observation.reason` and, in its own words, in
  `evidence`; `service.reconciler.verdicts` weighs it against what the driver said.
- A cluster may start the same command again by itself (SLURM requeues, KubeRay makes a new head).
  That start never goes on under the number of the first: it is the next attempt, or it ends at once
  (see `service.spec.attempt`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from service.spec import JobContext, JobSpec, Reason
from service.validation.problems import FieldProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One attempt, ready to start: its job's folder is written."""

    job_id: str
    attempt: int
    job_dir: Path
    """The job's folder, laid out as `service.spec.attempt` says."""
    context: JobContext


class Phase(StrEnum):
    """What a launcher sees of an attempt."""

    QUEUED = "queued"
    """Accepted; waits for machines."""
    RUNNING = "running"
    """Its driver lives."""
    EXITED = "exited"
    """Its driver has ended. Others of its processes may be left, see `leftovers`."""
    UNKNOWN = "unknown"
    """The launcher has no trace of it: it was never started, or all about it was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look at an attempt."""

    phase: Phase
    exit_code: int | None = None
    """With EXITED; null where it is unknown or a signal ended it."""
    exit_signal: int | None = None
    """With EXITED: the signal that ended it."""
    reason: Reason | None = None
    """With EXITED: why, as far as the cluster knows; null where it does not, or it ended well."""
    leftovers: int = 0
    """With EXITED: how many of its processes are still there."""
    evidence: str = ""
    """What was seen, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a launcher would hand to its cluster, for people to read."""

    kind: str
    """`sbatch`, `rayjob` or `ray_job`."""
    text: str
    """The batch script, the manifest as YAML, or the request as JSON. It holds no secret."""


class LaunchError(Exception):
    """The attempt cannot be started, and nothing of it was."""


class LauncherUnavailable(Exception):
    """The launcher did not answer; nothing is known, so nothing may be concluded. Ask again."""


class Launcher(Protocol):
    """Something that runs drivers."""

    capacity: int | None
    """How many jobs it takes at once; the service queues the others. Null sets no limit."""
    nodes: int | None
    """How many machines one job can have; null where it cannot be known."""
    gpus_per_node: int | None
    """How many GPUs each machine has; null where it cannot be known."""
    compute_capability: tuple[int, int] | None
    """CUDA compute capability of its oldest GPU, as (9, 0); null where it cannot be known."""
    poll_seconds: float
    """How often it is worth asking."""

    def check(self, spec: JobSpec) -> Sequence[FieldProblem]:
        """What of a job's `resources` this cluster can never give; asks nobody."""

    def preview(self, request: LaunchRequest) -> Submission | None:
        """What `submit` would hand over; null where there is no cluster. Starts nothing."""

    def identify(self, job_id: str, attempt: int) -> str:
        """The launcher's id of an attempt, started or not; asks nobody."""

    def submit(self, request: LaunchRequest) -> None:
        """Starts the attempt, or finds that it was started before and changes nothing.

        Raises:
            LaunchError: it cannot be started.
            LauncherUnavailable: no answer; it may have been started.
        """

    def poll(self, launcher_id: str) -> Observation:
        """Looks at an attempt.

        Raises:
            LauncherUnavailable: no answer.
        """

    def cancel(self, launcher_id: str, grace_seconds: float) -> None:
        """Asks for the end of all processes of an attempt, wherever they went.

        It gets `grace_seconds` to end by itself; what is left then is killed. Returns at once. Call
        it again, with what remains of the grace, until `poll` shows EXITED without leftovers. An
        attempt that was never started can never start from here on.

        Raises:
            LauncherUnavailable: no answer.
        """

    def close(self) -> None:
        """Ends watches and connections; attempts go on. The launcher is not used after it."""


def only_for(spec: JobSpec, *, none_of: Sequence[str], kind: str) -> list[FieldProblem]:
    """Refuses parts of `resources` that belong to other kinds of clusters.

    Args:
        spec: the job.
        none_of: names of the parts.
        kind: of the cluster.
    """
    return [
        FieldProblem(
            field=f"resources.{part}",
            message=f"the cluster {spec.resources.cluster} is of type {kind}, which has no use "
            "for it",
            fix="remove it, or name another cluster",
        )
        for part in none_of
        if getattr(spec.resources, part) is not None
    ]
