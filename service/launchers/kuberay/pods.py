"""The pods of an attempt: one template for the head, one for the workers.

They meet the "restricted" pod security standard where the operator did not ask for less: no root,
no capability, no way to gain one, the runtime's own seccomp profile, a root file system that nobody
can write to, and no token of the cluster.
"""

from collections.abc import Mapping
from typing import Any, Literal

from service.launchers.kuberay import names, scripts
from service.launchers.kuberay.config import KubeRayCluster
from service.launchers.kuberay.shape import Shape, quantity
from service.launchers.processes import ATTEMPT_VARIABLE, JOB_VARIABLE
from service.launchers.protocol import LaunchRequest
from service.settings import DATA_ROOTS_VARIABLE
from service.spec import driver_variables
from service.spec.resources import KubernetesSpec, TolerationSpec

CONTAINER = "ray"
GRACE_MARGIN_SECONDS = 5
"""Of the time that a pod has to end, for Ray to end in after the driver."""

_TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"

Role = Literal["head", "worker"]


def template(
    cluster: KubeRayCluster, request: LaunchRequest, shape: Shape, role: Role, data_roots: str
) -> dict[str, Any]:
    """The pod template of a group.

    Args:
        cluster: what its operator says.
        request: the attempt.
        shape: what each pod takes.
        role: of the group.
        data_roots: value of the variable of that name.
    """
    wanted = kubernetes(request)
    return {
        "metadata": {
            "labels": {**cluster.labels, **names.labels(request.job_id, request.attempt)},
            "annotations": {
                **cluster.annotations,
                **_topology_annotation(cluster, wanted),
                **_scrape_annotations(cluster, role),
            },
        },
        "spec": {
            # Without this a container that died would be started again in the same pod, and the
            # driver's second life could not be told from its first.
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _termination(cluster, request),
            "securityContext": _pod_security(cluster),
            **_placement(cluster, request, wanted),
            "volumes": _volumes(cluster),
            "containers": [_container(cluster, request, shape, role, data_roots)],
            **_names(cluster, wanted),
        },
    }


def kubernetes(request: LaunchRequest) -> KubernetesSpec:
    """What the job asks of Kubernetes."""
    return request.context.spec.resources.kubernetes or KubernetesSpec()


def _container(
    cluster: KubeRayCluster, request: LaunchRequest, shape: Shape, role: Role, data_roots: str
) -> dict[str, Any]:
    hook = scripts.hooks(request.job_dir, request.attempt)[role]
    secrets = list(cluster.env_from_secrets)
    if request.context.spec.checkpoint.storage is not None:
        secrets += cluster.storage_secrets
    return {
        "name": CONTAINER,
        "image": cluster.image,
        "imagePullPolicy": cluster.image_pull_policy,
        "env": _environment(cluster, request, role, data_roots),
        "envFrom": [{"secretRef": {"name": name}} for name in secrets],
        "resources": shape.container_resources(),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": cluster.read_only_root,
            "capabilities": {
                "drop": ["ALL"],
                **({"add": cluster.add_capabilities} if cluster.add_capabilities else {}),
            },
        },
        "volumeMounts": [
            *(volume.mount() for volume in cluster.volumes),
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", hook]}}},
    }


def _environment(
    cluster: KubeRayCluster, request: LaunchRequest, role: Role, data_roots: str
) -> list[dict[str, Any]]:
    termination = _termination(cluster, request)
    left = max(1, termination - GRACE_MARGIN_SECONDS)
    values = {
        # The account's home cannot be written to; what is kept there is of no use to another pod.
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **cluster.env,
        JOB_VARIABLE: request.job_id,
        ATTEMPT_VARIABLE: str(request.attempt),
        DATA_ROOTS_VARIABLE: data_roots,
        driver_variables.GRACE_SECONDS: str(left),
        driver_variables.NODE_WAIT_SECONDS: f"{cluster.node_wait_seconds:g}",
        # A worker that is told to end says so to the driver, and its ranks live on meanwhile. The
        # head's hook has waited for the driver before Ray is told.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(left if role == "worker" else 0),
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": str(termination),
    }
    if _serves_metrics(cluster, role):
        values[driver_variables.METRICS_PORT] = str(cluster.metrics_port)
    uid = {"fieldRef": {"fieldPath": "metadata.uid"}}
    return [
        *({"name": name, "value": _literal(value)} for name, value in values.items()),
        {"name": scripts.POD_UID_VARIABLE, "valueFrom": uid},
    ]


def _serves_metrics(cluster: KubeRayCluster, role: Role) -> bool:
    return cluster.metrics_port is not None and role == "head"


def _scrape_annotations(cluster: KubeRayCluster, role: Role) -> Mapping[str, str]:
    if not _serves_metrics(cluster, role):
        return {}
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(cluster.metrics_port)}


def _literal(value: str) -> str:
    """Kubernetes reads `$(NAME)` in a value as another variable, and `$$` as a dollar sign."""
    return value.replace("$", "$$")


def _termination(cluster: KubeRayCluster, request: LaunchRequest) -> int:
    return cluster.termination(request.context.spec.faults.grace_seconds)


def _pod_security(cluster: KubeRayCluster) -> dict[str, Any]:
    chosen = {
        "runAsGroup": cluster.run_as_group,
        "fsGroup": cluster.fs_group,
        "supplementalGroups": cluster.supplemental_groups or None,
    }
    return {
        "runAsUser": cluster.run_as_user,
        "runAsNonRoot": cluster.run_as_user != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
        **{name: value for name, value in chosen.items() if value is not None},
        # A large volume is not walked through at every start.
        **({"fsGroupChangePolicy": "OnRootMismatch"} if cluster.fs_group is not None else {}),
    }


def _placement(
    cluster: KubeRayCluster, request: LaunchRequest, wanted: KubernetesSpec
) -> dict[str, Any]:
    placement: dict[str, Any] = {}
    selector = {**wanted.node_selector, **cluster.node_selector}
    tolerations = [_toleration(each) for each in (*cluster.tolerations, *wanted.tolerations)]
    if selector:
        placement["nodeSelector"] = selector
    if tolerations:
        placement["tolerations"] = tolerations
    if wanted.topology is not None and queue(cluster, wanted) is None:
        placement["affinity"] = _together(request, wanted.topology)
    return placement


def queue(cluster: KubeRayCluster, wanted: KubernetesSpec) -> str | None:
    """Kueue's local queue that the job goes to; null where it starts at once."""
    return wanted.queue or cluster.queue


def _together(request: LaunchRequest, topology: str) -> dict[str, Any]:
    """All pods of the attempt on nodes that share the label's value."""
    own = {"matchLabels": names.labels(request.job_id, request.attempt)}
    term = {"labelSelector": own, "topologyKey": topology}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _topology_annotation(cluster: KubeRayCluster, wanted: KubernetesSpec) -> Mapping[str, str]:
    if wanted.topology is None or queue(cluster, wanted) is None:
        return {}
    return {_TOPOLOGY_ANNOTATION: wanted.topology}


def _toleration(toleration: TolerationSpec) -> dict[str, Any]:
    return toleration.model_dump(exclude_none=True)


def _volumes(cluster: KubeRayCluster) -> list[dict[str, Any]]:
    tmp = {} if cluster.tmp_gib is None else {"sizeLimit": quantity(cluster.tmp_gib)}
    shm = {"medium": "Memory", "sizeLimit": quantity(cluster.shm_gib)}
    return [
        *(volume.source() for volume in cluster.volumes),
        {"name": "tmp", "emptyDir": tmp},
        {"name": "shm", "emptyDir": shm},
    ]


def _names(cluster: KubeRayCluster, wanted: KubernetesSpec) -> dict[str, Any]:
    """What the cluster knows by name."""
    known: dict[str, Any] = {
        "serviceAccountName": cluster.service_account,
        "runtimeClassName": cluster.runtime_class,
        "priorityClassName": wanted.priority_class or cluster.priority_class,
        "imagePullSecrets": [{"name": name} for name in cluster.image_pull_secrets] or None,
    }
    return {name: value for name, value in known.items() if value is not None}
