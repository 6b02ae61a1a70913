"""This machine as a site: always there, so the suite runs on it in `make test` too."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from service.launchers import Site as LauncherSite
from service.launchers.local import LocalCluster, LocalLauncher
from service.launchers.processes import marked
from tests.cluster.sites.site import DRIVER, Ability, Patience, Site


class _Driven(LocalCluster):
    """The local cluster with another driver, which a clusters file cannot name."""

    def open(self, site: LauncherSite) -> LocalLauncher:
        return LocalLauncher(
            site.jobs_dir, capacity=None, gpus=0, command=[str(DRIVER)], poll_seconds=0.02
        )


class LocalSite(Site):
    """Processes of this machine."""

    kind = "local"
    patience = Patience(start=30, end=30, again=30)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = _Driven()
        self.resources = {}
        self.cannot = {
            Ability.QUEUE: "this machine starts a driver at once; the service holds jobs back",
            Ability.LOSE_NODE: "the only machine is the one that the service runs on",
            Ability.LIMIT_MEMORY: "nothing here limits a driver's memory but the machine's end",
            Ability.AWAY: "there is no server between the service and a process of its machine",
        }

    def fill(self) -> AbstractContextManager[None]:
        raise NotImplementedError(self.cannot[Ability.QUEUE])

    def preempt(self, launcher_id: str) -> None:
        """A TERM that the service did not send, as an operator does who wants the machine."""
        job_id, _, attempt = launcher_id.rpartition("/")
        for process in marked(job_id, int(attempt)):
            os.kill(process.pid, signal.SIGTERM)

    def lose_node(self, launcher_id: str) -> None:
        raise NotImplementedError(self.cannot[Ability.LOSE_NODE])

    def away(self) -> AbstractContextManager[None]:
        raise NotImplementedError(self.cannot[Ability.AWAY])


def open_site(folder: Path) -> Iterator[Site]:
    yield LocalSite(folder)
