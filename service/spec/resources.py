"""Where a job runs, what it may take there, and how often it is tried.

`resources` holds what every kind of cluster understands; `resources.slurm` and
`resources.kubernetes` what only one of them does. What a job may not choose (images, volumes,
accounts of the cluster, commands) is not here: the operator sets it for the whole cluster
(`service.launchers`).
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from service.spec.base import SpecModel

SlurmWord = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
"""A name that SLURM knows: of a partition, an account, a reservation."""
SlurmExpression = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9\[(][A-Za-z0-9._:,=&|*()\[\]/-]{0,255}$")
]
"""Names joined by SLURM's own characters, as `a100&ib` or `gpu:h100:8`."""
LabelKey = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
        r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
    ),
]
"""A Kubernetes label's name, with or without a prefix."""
LabelValue = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")
]
DnsName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", max_length=253)
]


class SlurmSpec(SpecModel):
    """What a job asks of SLURM; null leaves it to the cluster's own default."""

    partition: SlurmExpression | None = None
    """Partition, or several with commas between them: the first that has room."""
    account: SlurmWord | None = None
    """Account that is charged."""
    qos: SlurmWord | None = None
    """Quality of service."""
    reservation: SlurmWord | None = None
    """Reservation to use."""
    constraint: SlurmExpression | None = None
    """Features that the machines must have, as `h100&ib`."""
    gres: SlurmExpression | None = None
    """Generic resources of each machine, as `gpu:h100:8`; null asks for `gpus_per_node` GPUs."""
    exclusive: bool = False
    """Machines for this job alone."""
    requeue: bool = True
    """SLURM may queue the job again, with its age, after preemption or a lost machine."""
    after: Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(max_length=32)] = Field(
        default_factory=list
    )
    """SLURM's ids of jobs that must have ended well first."""


class TolerationSpec(SpecModel):
    """A taint of a Kubernetes node that the job may live with."""

    key: LabelKey | None = None
    """Its name; null, with `operator: Exists`, tolerates all."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Whether the value counts."""
    value: LabelValue | None = None
    """With `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Null means every effect."""


class KubernetesSpec(SpecModel):
    """What a job asks of Kubernetes; null leaves it to the cluster's own default."""

    queue: DnsName | None = None
    """Kueue's local queue."""
    priority_class: DnsName | None = None
    """Priority class of its pods, and of its workload in Kueue."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Labels that its nodes must have, besides the cluster's own."""
    tolerations: Annotated[list[TolerationSpec], Field(max_length=32)] = Field(default_factory=list)
    """Taints that it may live with, besides the cluster's own."""
    topology: LabelKey | None = None
    """Label whose value all its nodes share, as a rack or a block (Kueue's topology level)."""


class ResourceSpec(SpecModel):
    """Where the job runs and what it may take."""

    cluster: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = "local"
    """A cluster of the service, by its name."""
    nodes: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Machines."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each machine; 0 runs the ranks on the CPU."""
    cpus_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Cores of each machine; null takes one a rank and one more."""
    memory_gib_per_node: Annotated[float, Field(gt=0, le=65536)] | None = None
    """Memory of each machine in GiB; null leaves it to the cluster."""
    time_limit_minutes: Annotated[int, Field(ge=1)] | None = None
    """After so many minutes an attempt is stopped with reason TIMEOUT; null sets no limit."""
    slurm: SlurmSpec | None = None
    """For a cluster of type `slurm` only."""
    kubernetes: KubernetesSpec | None = None
    """For a cluster of type `kuberay` only."""


class RetrySpec(SpecModel):
    """How often a failed attempt is followed by another, by cause."""

    infrastructure: Annotated[int, Field(ge=0, le=1000)] = 3
    """After a lost node, process or connection: the next attempt goes on from the checkpoint."""
    user_error: Annotated[int, Field(ge=0, le=1000)] = 0
    """After an error of the job itself (bad data, a bug in an environment)."""
