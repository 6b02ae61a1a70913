"""A cluster that the conformance suite runs on, and what it can have done to it.

Each kind of cluster has a module `tests/cluster/sites/KIND.py` with a function

    def open_site(folder: Path) -> Iterator[Site]

which is used as a context manager's body: it brings up (or finds) the real thing, yields a site,
and takes down what it brought up. It calls `pytest.skip` with a plain reason where parts of the
real thing are missing on this machine. `folder` is empty and of the test's own.

The drivers that run there are `tests/cluster/conformance/driver.py`: `Site.cluster` is an
operator's config whose `python` is that file. It is executable, skips the `-m MODULE` that a
launcher gives to an interpreter, and needs nothing but some python3 in PATH.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from service.launchers import ClusterConfig, Launcher
from service.launchers import Site as LauncherSite

DRIVER = Path(__file__).parents[1] / "conformance" / "driver.py"
"""Stands in for the worker's python; see its text for what it can be told."""


class Ability(StrEnum):
    """What some scenarios need a cluster to be capable of."""

    QUEUE = "queue"
    """It can be full: `Site.fill`."""
    PREEMPT = "preempt"
    """It takes machines back for others: `Site.preempt`."""
    LOSE_NODE = "lose-node"
    """It has machines that can go away: `Site.lose_node`."""
    LIMIT_MEMORY = "limit-memory"
    """It ends who takes more memory than `resources.memory_gib_per_node`."""
    AWAY = "away"
    """There is something between it and the service that can be away: `Site.away`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the site may take, in seconds; tests wait up to this and go on at once."""

    start: float
    """From `submit` until the driver runs on free machines."""
    end: float
    """From the driver's end, or a kill, until `poll` shows EXITED with nothing left."""
    again: float
    """From losing its machines until the next attempt may run."""


class Site(ABC):
    """One real cluster, up."""

    kind: str
    """As `type` in a clusters file."""
    cluster: ClusterConfig
    """An operator's config for it. It is pickled into other processes."""
    folder: Path
    """Seen by tests and drivers under this path; drivers may write below it."""
    patience: Patience
    cannot: Mapping[Ability, str]
    """What it cannot do, each with a plain reason."""
    resources: Mapping[str, Any]
    """`resources` of each job there: the least that it takes to run a driver of a few MB."""
    memory_limit_gib = 0.25
    """`resources.memory_gib_per_node` of the job that takes more than that."""

    def launcher(self, jobs_dir: Path) -> Launcher:
        """A new one, as a server that was just started has; `jobs_dir` is below `folder`."""
        return self.cluster.open(LauncherSite(jobs_dir=jobs_dir))

    @abstractmethod
    def fill(self) -> AbstractContextManager[None]:
        """Inside the block a job that is submitted waits in the cluster's queue."""

    @abstractmethod
    def preempt(self, launcher_id: str) -> None:
        """Has the cluster take the machines of a running attempt back. Returns when that has begun;
        they are free again a little later, by themselves."""

    @abstractmethod
    def lose_node(self, launcher_id: str) -> None:
        """Has the machine that the driver of a running attempt is on go away, as the cluster sees
        it. Returns when that has begun; another machine (or the same, back) is free later."""

    @abstractmethod
    def away(self) -> AbstractContextManager[None]:
        """Inside the block the cluster's server does not answer; attempts run on."""
