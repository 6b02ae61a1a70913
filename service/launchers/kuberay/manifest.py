"""The RayJob of an attempt, as plain data made by pure functions.

- The operator speaks to Ray's dashboard itself (HTTPMode): no submitter pod, and nothing that
  would run the command again for a back-off of its own.
- `backoffLimit` is 0: retries are the service's, which counts them by cause and resumes.
- The cluster goes when the job is over, also where the service is away.
- No `activeDeadlineSeconds`: the service keeps the time limit, so that a job is told to end, saves,
  and ends with the reason TIMEOUT.
- With a queue it is made suspended, for Kueue to admit.
- The command asks for no cores, so that Ray runs the driver on the head.
"""

from typing import Any

import yaml

from service.launchers.cluster import Site
from service.launchers.kuberay import names, scripts
from service.launchers.kuberay.config import KubeRayCluster
from service.launchers.kuberay.pods import kubernetes, queue, template
from service.launchers.kuberay.shape import shape_of
from service.launchers.protocol import LaunchRequest
from service.settings import joined_roots

GROUP = "ray.io"
VERSION = "v1"
PLURAL = "rayjobs"
KUEUE_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

_HEAD_PARAMS = {
    "dashboard-host": "0.0.0.0",
    "no-monitor": "true",  # nothing scales this Ray
}


def rayjob(cluster: KubeRayCluster, site: Site, request: LaunchRequest) -> dict[str, Any]:
    """The RayJob."""
    wanted = kubernetes(request)
    local_queue = queue(cluster, wanted)
    labels = {**cluster.labels, **names.labels(request.job_id, request.attempt)}
    if local_queue is not None:
        labels[KUEUE_QUEUE_LABEL] = local_queue
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "RayJob",
        "metadata": {
            "name": names.rayjob_name(request.job_id, request.attempt),
            "namespace": cluster.namespace,
            "labels": labels,
            "annotations": {
                names.JOB_ANNOTATION: request.job_id,
                names.JOB_NAME_ANNOTATION: request.context.spec.name,
                names.FOLDER_ANNOTATION: str(request.job_dir),
            },
        },
        "spec": {
            "submissionMode": "HTTPMode",
            "entrypoint": scripts.entrypoint(cluster.python, request.job_dir, request.attempt),
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": cluster.keep_finished_seconds,
            "suspend": local_queue is not None,
            "rayClusterSpec": _ray_cluster(cluster, site, request),
        },
    }


def as_yaml(manifest: dict[str, Any]) -> str:
    """The manifest for people, in the order in which it was built."""
    return yaml.dump(manifest, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=100)


def _ray_cluster(cluster: KubeRayCluster, site: Site, request: LaunchRequest) -> dict[str, Any]:
    shape = shape_of(cluster, request.context)
    roots = joined_roots(site.data_roots)
    head = {
        "rayStartParams": {**shape.ray_start_params(), **_HEAD_PARAMS},
        "template": template(cluster, request, shape, "head", roots),
    }
    workers = {
        "groupName": "workers",
        "replicas": shape.workers,
        "minReplicas": shape.workers,
        "maxReplicas": shape.workers,
        "rayStartParams": shape.ray_start_params(),
        "template": template(cluster, request, shape, "worker", roots),
    }
    return {
        "rayVersion": cluster.ray_version,
        **({"authOptions": {"mode": "token"}} if cluster.ray_authentication else {}),
        "headGroupSpec": head,
        "workerGroupSpecs": [workers] if shape.workers else [],
    }


class _Readable(yaml.SafeDumper):
    """Texts of several lines as they are, and no references between equal parts."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Readable.add_representer(str, _text)
