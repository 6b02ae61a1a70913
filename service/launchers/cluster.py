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

from pydantic import BaseModel, ConfigDict, Field

from service.launchers.protocol import Launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a launcher gets to know of the service that it works for."""

    jobs_dir: Path
    """Holds the jobs' folders, each under its job's id; drivers see it under the same path."""
    data_roots: tuple[Path, ...] = ()
    """Folders that environments may read files from."""


class ClusterConfig(BaseModel, ABC):
    """One cluster; subclasses add `type: Literal[...]` and what their kind needs."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )

    type: str
    """Kind of the cluster: the name of an entry point."""
    max_jobs: Annotated[int, Field(ge=1)] | None = None
    """How many jobs it gets at once; the service queues the others. Null sets no limit."""

    @abstractmethod
    def open(self, site: Site) -> Launcher:
        """The launcher. Connects to nothing: the cluster may be away just now."""
