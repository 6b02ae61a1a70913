"""What an operator says about one cluster: a part of the clusters file.

    clusters:
      local: {type: local, max_jobs: 1}
      a100: {type: slurm, partition: gpu}

The keys are the names that jobs give as `resources.cluster`. Each `type` is an entry point of the
group `planish.launchers`, which names a subclass of `ClusterConfig`; so others can add theirs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, StringConstraints

from service.launchers.protocol import Launcher

Count = Annotated[int, Field(ge=1)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Of an environment variable."""
RESERVED_PREFIX = "PLANISH_"
"""Variables whose names begin so are the launchers' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a launcher gets to know of the service that it works for."""

    jobs_dir: Path
    """Holds the jobs' folders, each under its job's id; drivers see it under the same path."""
    data_roots: tuple[Path, ...] = ()
    """Folders that environments may read files from."""


class ClusterPart(BaseModel):
    """A part of the clusters file: unknown fields are refused, and no error repeats a value."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )


class ClusterConfig(ClusterPart, ABC):
    """One cluster; subclasses add `type: Literal[...]` and what their kind needs."""

    type: str
    """Kind of the cluster: the name of an entry point."""
    max_jobs: Count | None = None
    """How many jobs it gets at once; the service queues the others. Null sets no limit."""

    @abstractmethod
    def open(self, site: Site) -> Launcher:
        """The launcher. Connects to nothing: the cluster may be away just now."""


class RemoteCluster(ClusterConfig):
    """A cluster whose size the service cannot see; its operator may tell it."""

    nodes: Count | None = None
    """How many machines one job can have; null where that is not known."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs of each machine; null where that is not known."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability of the oldest GPU, as [9, 0]; null where that is not known."""


class RemoteLauncher:
    """What a launcher says of a remote cluster is what the operator says; see `Launcher`."""

    def __init__(self, cluster: RemoteCluster) -> None:
        self.capacity = cluster.max_jobs
        self.nodes = cluster.nodes
        self.gpus_per_node = cluster.gpus_per_node
        self.compute_capability = cluster.compute_capability
