"""Runs attempts as RayJobs.

Each step can be cut short by a kill, and is done again by whoever comes next:

- A RayJob's name follows from job and attempt, so the API server takes it only once.
- A cancel leaves `shut-out` in the attempt's folder before it deletes anything. A submit looks for
  it before it makes the RayJob and once more after; should it be killed in between, the RayJob's
  own command looks again and does not start a driver.
- An end that was seen is written down before it is told, so that nothing which happens to RayJob
  and pods later can change it.

What the watch has serves for every look at a job that goes on. Before an end is concluded the
server itself is asked.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from service.launchers.cluster import RemoteLauncher, Site
from service.launchers.kuberay import names
from service.launchers.kuberay.client import CONFLICT, NOT_FOUND, Api, Refused
from service.launchers.kuberay.config import KubeRayCluster
from service.launchers.kuberay.manifest import as_yaml, rayjob
from service.launchers.kuberay.observe import Sight, is_overdue, observe
from service.launchers.kuberay.pod_reasons import is_going, is_lost, name_of
from service.launchers.kuberay.recent_ends import RecentEnds
from service.launchers.kuberay.record import Record
from service.launchers.kuberay.watch import Watch
from service.launchers.protocol import (
    LaunchError,
    LauncherUnavailable,
    LaunchRequest,
    Observation,
    Phase,
    Submission,
    only_for,
)
from service.spec import JobSpec
from service.spec.attempt import attempt_path
from service.validation.problems import FieldProblem

_log = logging.getLogger(__name__)

_KILL_SECONDS = 1
"""A pod's grace when it is killed. With 0 the server would forget it before its processes end."""


class KubeRayLauncher(RemoteLauncher):
    """Launches in one namespace of one Kubernetes cluster."""

    def __init__(self, cluster: KubeRayCluster, site: Site) -> None:
        """Connects to nothing yet.

        Args:
            cluster: what the operator says about it.
            site: what the launcher gets to know of the service.
        """
        super().__init__(cluster)
        self.poll_seconds = cluster.poll_seconds
        self._cluster = cluster
        self._site = site
        self._api = Api(
            cluster.namespace,
            kubeconfig=cluster.kubeconfig,
            context=cluster.context,
            timeout_seconds=cluster.request_timeout_seconds,
        )
        ours = f"{names.MANAGER_LABEL}={names.MANAGER}"
        self._rayjobs = Watch(self._api, "rayjobs", ours)
        self._pods = Watch(self._api, "pods", ours)
        self._ends = RecentEnds(lambda job_id, attempt: bool(self._record(job_id, attempt).head()))
        self._rayjobs.on_change = self._ends.see_rayjob
        self._pods.on_change = self._ends.see_pod

    def check(self, spec: JobSpec) -> Sequence[FieldProblem]:
        """Refuses what is SLURM's, and every job where pods could not see its folder."""
        problems = only_for(spec, none_of=("slurm",), kind="kuberay")
        jobs_dir = self._site.jobs_dir.absolute()
        if not any(jobs_dir.is_relative_to(each.mount_path) for each in self._cluster.volumes):
            problems.append(
                FieldProblem(
                    field="resources.cluster",
                    message=f"pods of the cluster {spec.resources.cluster} do not see the jobs' "
                    f"folder {jobs_dir}: none of its volumes is mounted there or above",
                    fix="have the operator add it to `volumes` in the clusters file",
                )
            )
        return problems

    def preview(self, request: LaunchRequest) -> Submission | None:
        """The RayJob as YAML."""
        return Submission(kind="rayjob", text=as_yaml(self._manifest(request)))

    def identify(self, job_id: str, attempt: int) -> str:
        """`JOB_ID/ATTEMPT`; `kubectl get rayjobs -l planish.io/job=JOB_ID` shows it."""
        return names.launcher_id(job_id, attempt)

    def submit(self, request: LaunchRequest) -> None:
        """Makes the RayJob, or finds that it was made before.

        Raises:
            LaunchError: the API server refuses it.
            LauncherUnavailable: no answer; it may have been made.
        """
        record = self._record(request.job_id, request.attempt)
        if record.is_shut_out or record.head() is not None or record.verdict() is not None:
            return
        name = names.rayjob_name(request.job_id, request.attempt)
        try:
            self._delete_earlier(request)
            self._api.create_rayjob(self._manifest(request))
        except Refused as error:
            self._accept_or_raise(error, name, request.job_id)
        if record.is_shut_out:
            self._api.delete_rayjob(name)

    def poll(self, launcher_id: str) -> Observation:
        """Looks at an attempt.

        Raises:
            LauncherUnavailable: no answer, or one that is not understood.
        """
        self._rayjobs.start()
        self._pods.start()
        job_id, attempt = names.parse_launcher_id(launcher_id)
        record = self._record(job_id, attempt)
        sight = self._watched(record, job_id, attempt)
        if sight is not None and not is_overdue(sight):
            seen = observe(sight)
            if seen.phase in (Phase.QUEUED, Phase.RUNNING):
                return seen
        sight = self._asked(record, job_id, attempt)
        seen = observe(sight)
        if seen.phase is not Phase.EXITED or sight.verdict is not None:
            return seen
        return replace(record.keep_verdict(seen), leftovers=seen.leftovers)

    def cancel(self, launcher_id: str, grace_seconds: float) -> None:
        """Deletes the RayJob, whose pods then tell the driver; kills pods when the grace is over.

        Raises:
            LauncherUnavailable: no answer.
        """
        job_id, attempt = names.parse_launcher_id(launcher_id)
        self._record(job_id, attempt).shut_out()
        name = names.rayjob_name(job_id, attempt)
        found = self._api.get_rayjob(name)
        if found is not None and not is_going(found):
            self._api.delete_rayjob(name)
        if grace_seconds <= 0:
            for pod in self._list_pods(job_id, attempt):
                self._kill(pod)

    def close(self) -> None:
        """Ends the watches."""
        self._rayjobs.stop()
        self._pods.stop()
        self._api.close()

    @property
    def watch_age_seconds(self) -> float | None:
        """Seconds since the older of the watches last heard anything; null where nobody watches."""
        heard = [watch.health.heard_at for watch in (self._rayjobs, self._pods)]
        known = [at for at in heard if at is not None]
        return time.monotonic() - min(known) if known else None

    def _manifest(self, request: LaunchRequest) -> dict[str, Any]:
        return rayjob(self._cluster, self._site, request)

    def _record(self, job_id: str, attempt: int) -> Record:
        return Record(attempt_path(self._site.jobs_dir / job_id, attempt))

    def _delete_earlier(self, request: LaunchRequest) -> None:
        """The RayJobs of the job's earlier attempts, which have ended."""
        label = f"{names.JOB_LABEL}={names.job_label(request.job_id)}"
        for found in self._api.rayjobs(label)["items"]:
            number = int(found["metadata"]["labels"][names.ATTEMPT_LABEL])
            if number < request.attempt and not is_going(found):
                self._api.delete_rayjob(name_of(found))

    def _accept_or_raise(self, error: Refused, name: str, job_id: str) -> None:
        """Takes a RayJob that is there already, where it is this attempt's."""
        if error.status == NOT_FOUND:
            raise LaunchError(
                f"the namespace {self._cluster.namespace} has no RayJobs: {error}; are the "
                "namespace and the KubeRay operator there?"
            ) from error
        if error.status != CONFLICT:
            raise LaunchError(f"the Kubernetes API server refuses the RayJob: {error}") from error
        found = self._api.get_rayjob(name)
        if found is None:
            raise LauncherUnavailable(f"RayJob {name} went while it was looked at") from error
        annotations = found["metadata"].get("annotations") or {}
        if annotations.get(names.JOB_ANNOTATION) != job_id:
            raise LaunchError(f"there is a RayJob {name} of somebody else") from error

    def _watched(self, record: Record, job_id: str, attempt: int) -> Sight | None:
        """What the watches have of an attempt; null where that is old, or nothing."""
        if not (self._rayjobs.fresh and self._pods.fresh):
            return None
        head = record.head()
        found = self._rayjobs.get(names.rayjob_name(job_id, attempt))
        if found is None:
            return None
        pods = self._pods.labelled(names.labels(job_id, attempt))
        return self._sight(record, head, found, pods)

    def _asked(self, record: Record, job_id: str, attempt: int) -> Sight:
        """What the server has of an attempt now."""
        head = record.head()
        found = self._api.get_rayjob(names.rayjob_name(job_id, attempt))
        sight = self._sight(record, head, found, self._list_pods(job_id, attempt))
        if found is None or not is_overdue(sight):
            return sight
        cluster = (found.get("status") or {}).get("rayClusterName") or name_of(found)
        return replace(sight, events=self._events_of(cluster))

    def _sight(
        self,
        record: Record,
        head: str | None,
        found: Mapping[str, Any] | None,
        pods: Sequence[Mapping[str, Any]],
    ) -> Sight:
        return Sight(
            rayjob=found,
            pods=pods,
            head=head,
            now=time.time(),
            startup_seconds=self._cluster.startup_seconds,
            shut_out=record.is_shut_out,
            ran_out_of_memory=record.ran_out_of_memory,
            earlier_death=self._ends.death(head),
            evicted=found is not None and self._ends.was_evicted(found["metadata"]["uid"]),
            verdict=record.verdict(),
        )

    def _list_pods(self, job_id: str, attempt: int) -> list[dict[str, Any]]:
        wanted = names.labels(job_id, attempt)
        selector = ",".join(f"{name}={value}" for name, value in wanted.items())
        try:
            found: list[dict[str, Any]] = self._api.pods(selector)["items"]
        except Refused as error:
            raise LauncherUnavailable(
                f"the Kubernetes API server does not list pods: {error}"
            ) from error
        return found

    def _events_of(self, name: str) -> list[dict[str, Any]]:
        """Events about an object; none where they may not be read, as they only explain."""
        try:
            return self._api.events_of(name)
        except Refused as error:
            _log.warning("the Kubernetes API server does not list events: %s", error)
            return []

    def _kill(self, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        if metadata.get("deletionGracePeriodSeconds", _KILL_SECONDS + 1) > _KILL_SECONDS:
            self._api.delete_pod(metadata["name"], grace_seconds=_KILL_SECONDS)
            return
        if is_lost(pod, time.time()):
            _log.warning("pod %s does not end; its node seems to be gone", metadata["name"])
            self._api.delete_pod(metadata["name"], grace_seconds=0)
