"""Runs drivers as jobs of a Ray cluster that is there already.

Ray's id of an attempt is `planish-JOB-N`. Everything that is known lies in Ray and in the attempt's
folder, so a service that comes back finds all of it. What makes a second or a late start harmless,
and a kill possible, is told in `entrypoint`.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from service.jobs.folder import JobFolder
from service.launchers.cluster import RemoteLauncher, Site
from service.launchers.protocol import (
    LauncherUnavailable,
    LaunchRequest,
    Observation,
    Phase,
    Submission,
    only_for,
)
from service.launchers.ray_jobs.client import RayJobsClient
from service.launchers.ray_jobs.config import RayJobsCluster
from service.launchers.ray_jobs.entrypoint import DRIVER, KILL, NOBODY, TAKEN, submission
from service.launchers.ray_jobs.states import observe
from service.spec import JobSpec, Reason
from service.validation.problems import FieldProblem

_PREFIX = "planish-"


class RayJobsLauncher(RemoteLauncher):
    """Launches in one Ray cluster."""

    def __init__(self, cluster: RayJobsCluster, site: Site, *, client: RayJobsClient) -> None:
        """Connects to nothing yet.

        Args:
            cluster: what the operator says about it.
            site: what the launcher gets to know of the service.
            client: asks the cluster; closed with the launcher.
        """
        super().__init__(cluster)
        self.poll_seconds = cluster.poll_seconds
        self._cluster = cluster
        self._site = site
        self._client = client

    def check(self, spec: JobSpec) -> Sequence[FieldProblem]:
        """Ray has no options of its own; the cluster's size is checked for every kind."""
        return only_for(spec, none_of=("slurm", "kubernetes"), kind="ray_jobs")

    def preview(self, request: LaunchRequest) -> Submission:
        """The request's body, as JSON."""
        return Submission(kind="ray_job", text=json.dumps(self._body(request), indent=2) + "\n")

    def identify(self, job_id: str, attempt: int) -> str:
        """`planish-JOB-N`."""
        return f"{_PREFIX}{job_id}-{attempt}"

    def submit(self, request: LaunchRequest) -> None:
        """Submits the attempt, unless Ray has it or it was shut out.

        Raises:
            LaunchError: Ray refuses it.
            LauncherUnavailable: no answer; it may have been started.
        """
        launcher_id = self.identify(request.job_id, request.attempt)
        if self._taker(launcher_id) is not None or self._client.job(launcher_id) is not None:
            return
        try:
            self._client.submit(self._body(request))
        except LauncherUnavailable:
            # The answer may have been lost, or another service was a moment quicker.
            if self._client.job(launcher_id) is None:
                raise

    def poll(self, launcher_id: str) -> Observation:
        """Asks Ray, and looks who has taken the attempt.

        Raises:
            LauncherUnavailable: no answer, or one that is not understood.
        """
        job = self._client.job(launcher_id)
        taker = self._taker(launcher_id)
        if job is None:
            return _forgotten(taker)
        seen = observe(job)
        # Ray may start it all the same, until its command has seen that it is shut out.
        if taker == NOBODY and seen.phase in (Phase.QUEUED, Phase.RUNNING):
            return Observation(
                phase=Phase.EXITED,
                evidence=f"it was shut out before it began ({seen.evidence}; where Ray starts it "
                "after all, it ends at once)",
            )
        return seen

    def cancel(self, launcher_id: str, grace_seconds: float) -> None:
        """TERM to the driver, through Ray; KILL when the grace is over.

        Raises:
            LauncherUnavailable: no answer.
        """
        folder = self._folder(launcher_id)
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.symlink(NOBODY, folder / TAKEN)
        if grace_seconds <= 0:
            (folder / KILL).touch()
        self._client.stop(launcher_id)

    def close(self) -> None:
        """Closes the connections; jobs go on."""
        self._client.close()

    def _body(self, request: LaunchRequest) -> dict[str, object]:
        return submission(
            request,
            self.identify(request.job_id, request.attempt),
            python=self._cluster.python,
            env=self._cluster.env,
            data_roots=self._site.data_roots,
            driver_resources=self._cluster.driver_resources,
        )

    def _taker(self, launcher_id: str) -> str | None:
        """Who has taken the attempt; null where nobody did, so that it can still start."""
        try:
            return os.readlink(self._folder(launcher_id) / TAKEN)
        except FileNotFoundError:
            return None

    def _folder(self, launcher_id: str) -> Path:
        job_id, _, attempt = launcher_id.removeprefix(_PREFIX).rpartition("-")
        return JobFolder(self._site.jobs_dir / job_id).attempt(int(attempt)).path


def _forgotten(taker: str | None) -> Observation:
    """What to make of an attempt that Ray does not know."""
    if taker == DRIVER:
        return Observation(
            phase=Phase.EXITED,
            reason=Reason.NODE_FAILURE,
            evidence="Ray does not know the job any more: its head was replaced",
        )
    if taker == NOBODY:
        return Observation(phase=Phase.EXITED, evidence="it was shut out before it began")
    return Observation(phase=Phase.UNKNOWN, evidence="Ray does not know it")
