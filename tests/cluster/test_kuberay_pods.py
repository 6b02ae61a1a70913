"""The pods of an attempt under a real kubelet, with the command in Ray's place.

KubeRay would start Ray in them, and Ray the command. What is held to here is among kubelet, hooks,
kernel and driver, so it needs neither, and takes seconds instead of minutes.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.launchers import LaunchRequest, Site
from service.launchers.kuberay.manifest import rayjob
from service.launchers.kuberay.record import Record
from tests.cluster.conformance.trial import Trial
from tests.cluster.sites.kuberay import (
    KubeRaySite,
    Kubernetes,
    cluster_for,
    skip_unless_there,
    wait_for,
)
from tests.service.launchers.kuberay.attempts import cluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def site() -> Iterator[KubeRaySite]:
    skip_unless_there()
    with tempfile.TemporaryDirectory(prefix="planish-pods-") as path:
        Path(path).chmod(0o755)
        made = KubeRaySite(Path(path))
        made.kube.up(queued=False)
        yield made
        made.down()


@pytest.fixture
def trial(site: KubeRaySite) -> Iterator[Trial]:
    with Trial.on(site) as made:
        yield made


def pod_of(site: KubeRaySite, request: LaunchRequest, role: str, **options: Any) -> dict[str, Any]:
    """A pod from the attempt's template; the head's runs the command, a worker's waits."""
    config = cluster_for(
        site.folder, site.kube.namespace, kubeconfig=site.kube.path, request_cpus=0.01, **options
    )
    spec = rayjob(config, Site(jobs_dir=request.job_dir.parent), request)["spec"]
    ray = spec["rayClusterSpec"]
    group = ray["headGroupSpec"] if role == "head" else ray["workerGroupSpecs"][0]
    pod: dict[str, Any] = group["template"]
    pod["metadata"]["name"] = f"{request.job_id}-{role}"
    # As Ray does, in a session of its own below a process that TERM would end.
    command = spec["entrypoint"] if role == "head" else "sleep 600"
    pod["spec"]["containers"][0]["command"] = ["/bin/sh", "-c", command]
    return pod


def phase(kube: Kubernetes, pod: dict[str, Any]) -> str | None:
    """Of a pod; null where it is gone."""
    name = pod["metadata"]["name"]
    listed = kube.core.list_namespaced_pod(
        kube.namespace, field_selector=f"metadata.name={name}"
    ).items
    return listed[0].status.phase if listed else None


def start(site: KubeRaySite, trial: Trial, request: LaunchRequest, *pods: dict[str, Any]) -> None:
    """Makes pods and waits until they, and the driver, run."""
    for pod in pods:
        site.kube.core.create_namespaced_pod(site.kube.namespace, pod)
    wait_for(lambda: trial.starts(request.job_id), "the driver runs")
    for pod in pods:
        wait_for(lambda p=pod: phase(site.kube, p) == "Running", "the pod runs")  # type: ignore[misc]


def delete(kube: Kubernetes, *pods: dict[str, Any], **options: Any) -> None:
    for pod in pods:
        kube.core.delete_namespaced_pod(pod["metadata"]["name"], kube.namespace, **options)


def test_a_head_that_is_deleted_tells_its_driver_and_the_workers_wait(
    site: KubeRaySite, trial: Trial
) -> None:
    request = trial.job("slow-term=15", "wait", nodes=2, gpus_per_node=0)
    head, worker = (pod_of(site, request, role) for role in ("head", "worker"))
    start(site, trial, request, head, worker)
    record = Record(request.job_dir / "attempts/1")
    found = site.kube.core.read_namespaced_pod(head["metadata"]["name"], site.kube.namespace)
    assert record.head() == found.metadata.uid
    delete(site.kube, worker, head)
    wait_for(lambda: "asked to end by SIGTERM" in trial.log(request.job_id), "the driver was told")
    assert not (record.path / "outcome.json").exists()
    assert phase(site.kube, worker) == "Running"
    wait_for((record.path / "outcome.json").exists, "the driver has said its last words")
    wait_for(lambda: phase(site.kube, head) is None, "the head is gone")


def test_a_worker_that_is_deleted_alone_does_not_wait(site: KubeRaySite, trial: Trial) -> None:
    request = trial.job("wait", nodes=2, gpus_per_node=0)
    head, worker = (
        pod_of(site, request, role, termination_seconds=300) for role in ("head", "worker")
    )
    start(site, trial, request, head, worker)
    delete(site.kube, worker, grace_period_seconds=20)
    wait_for(lambda: phase(site.kube, worker) is None, "the worker is gone")
    assert phase(site.kube, head) == "Running"
    # A later wish can shorten the grace that a hook uses.
    (request.job_dir / "attempts/1/ending").touch()
    delete(site.kube, head)
    delete(site.kube, head, grace_period_seconds=1)
    wait_for(lambda: phase(site.kube, head) is None, "the head is gone", 120)


def test_a_driver_that_is_killed_for_memory_leaves_word_of_it(
    site: KubeRaySite, trial: Trial
) -> None:
    request = trial.job("eat-memory=1", memory_gib_per_node=0.25, gpus_per_node=0)
    head = pod_of(site, request, "head", shm_gib=0.25)
    site.kube.core.create_namespaced_pod(site.kube.namespace, head)
    wait_for(lambda: phase(site.kube, head) == "Failed", "the driver was killed")
    assert Record(request.job_dir / "attempts/1").ran_out_of_memory


def test_pods_meet_the_restricted_standard_where_the_operator_asks_for_no_less(
    site: KubeRaySite, trial: Trial
) -> None:
    label = "pod-security.kubernetes.io/enforce"
    namespace: Any = {"metadata": {"labels": {label: "restricted"}}}
    site.kube.core.patch_namespace(site.kube.namespace, namespace)
    request = trial.job("succeed", nodes=2, gpus_per_node=1)
    try:
        for role in ("head", "worker"):
            admitted = standard_pod(request, role)
            site.kube.core.create_namespaced_pod(site.kube.namespace, admitted, dry_run="All")
        refused = standard_pod(request, "head", run_as_user=0)
        with pytest.raises(Exception, match="violates PodSecurity"):
            site.kube.core.create_namespaced_pod(site.kube.namespace, refused, dry_run="All")
    finally:
        back: Any = {"metadata": {"labels": {label: None}}}
        site.kube.core.patch_namespace(site.kube.namespace, back)


def standard_pod(request: LaunchRequest, role: str, **options: Any) -> dict[str, Any]:
    """A pod as an operator has it who says only what must be said."""
    spec = rayjob(cluster(**options), Site(jobs_dir=request.job_dir.parent), request)["spec"]
    ray = spec["rayClusterSpec"]
    group = ray["headGroupSpec"] if role == "head" else ray["workerGroupSpecs"][0]
    pod: dict[str, Any] = group["template"]
    pod["metadata"]["name"] = f"standard-{role}"
    return pod
