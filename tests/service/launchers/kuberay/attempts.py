"""Attempts and objects of Kubernetes for the tests of the KubeRay launcher."""

from pathlib import Path
from typing import Any

from service.launchers import LaunchRequest, Site
from service.launchers.kuberay.config import KubeRayCluster
from tests.service.store.sample_jobs import context, document

JOB = "job-abcdefghijklmnop"
SITE = Site(jobs_dir=Path("/data/jobs"), data_roots=(Path("/data/rows"),))


def cluster(**options: Any) -> KubeRayCluster:
    """An operator's config; `options` add to the least that it needs."""
    return KubeRayCluster.model_validate(
        {
            "type": "kuberay",
            "image": "registry/planish:1",
            "volumes": [{"name": "jobs", "mount_path": "/data", "claim": "planish-data"}],
            **options,
        }
    )


def request(job_id: str = JOB, attempt: int = 1, **parts: Any) -> LaunchRequest:
    """A request to launch; `parts` are fields of the job's document."""
    resolved = context(document(**parts), job_id)
    return LaunchRequest(
        job_id=job_id, attempt=attempt, job_dir=SITE.jobs_dir / job_id, context=resolved
    )


def rayjob(word: str = "", **status: Any) -> dict[str, Any]:
    """A RayJob with that jobDeploymentStatus, made at second 1000 of the epoch."""
    return {
        "metadata": {
            "name": "rayjob",
            "uid": "uid-rayjob",
            "labels": {},
            "creationTimestamp": "1970-01-01T00:16:40Z",
        },
        "spec": {},
        "status": {"jobDeploymentStatus": word, **status} if word else {},
    }


def pod(uid: str = "uid-head", phase: str = "Running", **status: Any) -> dict[str, Any]:
    """A head's pod."""
    return {
        "metadata": {
            "name": f"pod-{uid}",
            "uid": uid,
            "labels": {"ray.io/node-type": "head"},
        },
        "status": {"phase": phase, **status},
    }
