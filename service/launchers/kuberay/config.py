"""What an operator says about a Kubernetes cluster with the KubeRay operator.

    clusters:
      k8s:
        type: kuberay
        namespace: planish
        image: registry.example.com/planish-worker:0.1.0
        volumes: [{name: jobs, mount_path: /data/planish, claim: planish-data}]
        queue: research

A job names a queue, a priority class, labels of nodes and tolerations. Everything else of its pods
(the image, volumes, accounts, the user that they run as, what of the kernel they may use) is said
here, so that no job can take more than its operator gave to all of them.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    StringConstraints,
    field_validator,
    model_validator,
)

from service.launchers.cluster import RESERVED_PREFIX, Count, RemoteCluster, Site, VariableName
from service.launchers.kuberay.volumes import AbsolutePath, Volume
from service.spec.resources import DnsName, LabelKey, LabelValue, TolerationSpec

if TYPE_CHECKING:
    from service.launchers.kuberay.launcher import KubeRayLauncher

ResourceName = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        max_length=253,
    ),
]
Capability = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z_]{0,40}$")]

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")
_RESERVED_PREFIXES = (RESERVED_PREFIX, "RAY_JOB_STOP_")


class KubeRayCluster(RemoteCluster):
    """A namespace of a Kubernetes cluster in which the KubeRay operator runs jobs."""

    type: Literal["kuberay"] = "kuberay"

    kubeconfig: AbsolutePath | None = None
    """Kubeconfig file; null takes the pod's own account inside a cluster, and what kubectl would
    take elsewhere."""
    context: str | None = None
    """Context of the kubeconfig; null takes its current one."""
    namespace: DnsName = "default"
    """Where RayJobs and pods are made."""

    image: Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=512)]
    """Image of head and workers, with Planish and Ray in it."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the node fetches the image."""
    image_pull_secrets: list[DnsName] = Field(default_factory=list)
    """Secrets, by name, that the image's registry asks for."""
    python: Annotated[str, StringConstraints(min_length=1, max_length=512)] = "python"
    """The image's interpreter that has Planish installed."""
    ray_version: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")] = "2.60.0"
    """Version of Ray in the image; KubeRay chooses its health checks by it."""
    ray_authentication: bool = False
    """Ray asks for a token, which KubeRay makes (operator 1.6, Ray 2.52 and newer)."""

    service_account: DnsName | None = None
    """Account of the pods; null takes the namespace's default one. Its token is not mounted."""
    run_as_user: NonNegativeInt = 10001
    """User id in the pods; it must be able to write the jobs' folders. 0 is root, without any of
    root's capabilities."""
    run_as_group: NonNegativeInt | None = None
    """Group id in the pods; null takes the image's."""
    fs_group: NonNegativeInt | None = None
    """Group that claimed volumes belong to."""
    supplemental_groups: list[NonNegativeInt] = Field(default_factory=list)
    """Other groups of the user."""
    read_only_root: bool = True
    """The image's files cannot be changed; /tmp and the volumes can."""
    add_capabilities: list[Capability] = Field(default_factory=list)
    """Kept when all others are dropped; RDMA needs IPC_LOCK."""

    volumes: Annotated[list[Volume], Field(min_length=1)]
    """One of them holds the jobs' folders, under the same path as in the service."""
    tmp_gib: PositiveFloat | None = None
    """Largest size of each pod's /tmp in GiB; null sets none."""
    shm_gib: Annotated[float, Field(ge=0.25)] = 8.0
    """Size of each pod's /dev/shm in GiB, in memory. Ray's object store has half of it."""

    env: dict[VariableName, str] = Field(default_factory=dict)
    """Variables of all pods, as NCCL_IB_HCA; no secrets."""
    env_from_secrets: list[DnsName] = Field(default_factory=list)
    """Secrets, by name, whose keys become variables of all pods."""
    storage_secrets: list[DnsName] = Field(default_factory=list)
    """The same, for jobs with `checkpoint.storage` only: who may use it."""

    memory_gib_per_node: PositiveFloat | None = None
    """Memory of each pod in GiB where a job does not say; null sets no limit."""
    request_cpus: PositiveFloat | None = None
    """Cores that the scheduler puts aside for each pod; null: as many as the job asks for."""
    request_memory_gib: PositiveFloat | None = None
    """Memory in GiB that the scheduler puts aside for each pod; null: as much as its limit."""
    limit_cpus: bool = False
    """A pod may not use idle cores beyond its own; some quotas ask for such a limit."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """What GPUs are called."""
    extra_resources: dict[ResourceName, Count] = Field(default_factory=dict)
    """Of each pod, as `rdma/hca: 1`."""
    runtime_class: DnsName | None = None
    """Runtime class of the pods."""
    annotations: dict[LabelKey, str] = Field(default_factory=dict)
    """Of the pods, as `k8s.v1.cni.cncf.io/networks` for RDMA."""
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Of RayJob and pods."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels that all nodes of jobs must have."""
    tolerations: list[TolerationSpec] = Field(default_factory=list)
    """Taints that all jobs may live with."""
    queue: DnsName | None = None
    """Kueue's local queue for jobs that name none; null starts them at once."""
    priority_class: DnsName | None = None
    """For jobs that name none."""

    startup_seconds: PositiveFloat = 900.0
    """How long head and driver may take to start once the job is admitted, images and all."""
    termination_seconds: Count | None = None
    """How long a pod that is told to end may take; null: the job's `faults.grace_seconds` and 20
    seconds more."""
    node_wait_seconds: PositiveFloat = 180.0
    """How long a driver that lost a worker pod waits for another before it gives up."""
    metrics_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the head's pod on which the driver serves metrics; null serves none."""
    keep_finished_seconds: NonNegativeInt = 300
    """A finished job's pods go after this even where the service is away."""
    request_timeout_seconds: PositiveFloat = 10.0
    """How long the API server may take for an answer."""
    poll_seconds: PositiveFloat = 1.0
    """How often a job is looked at; that costs the API server nothing while the watch holds."""

    @field_validator("env")
    @classmethod
    def _no_secret(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if name.startswith(_RESERVED_PREFIXES):
                raise ValueError(f"{name} is set by the launcher")
            if any(word in name.upper() for word in _SECRET_WORDS):
                raise ValueError(
                    f"{name} looks like a secret, which manifests must not hold; put it into a "
                    "Secret and name that in `env_from_secrets`"
                )
        return env

    @model_validator(mode="after")
    def _distinct_volumes(self) -> "KubeRayCluster":
        names = [volume.name for volume in self.volumes]
        paths = [volume.mount_path.rstrip("/") for volume in self.volumes]
        for kind, values in (("name", names), ("mount_path", paths)):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"two volumes have the {kind} {twice[0]}")
        return self

    def open(self, site: Site) -> "KubeRayLauncher":
        """The launcher."""
        from service.launchers.kuberay.launcher import KubeRayLauncher

        return KubeRayLauncher(self, site)

    def termination(self, grace_seconds: float) -> int:
        """Seconds that the pods of a job with such a grace may take to end."""
        if self.termination_seconds is not None:
            return self.termination_seconds
        return round(grace_seconds) + 20
