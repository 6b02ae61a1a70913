from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from service.launchers.kuberay.manifest import as_yaml, rayjob
from tests.service.launchers.kuberay.attempts import JOB, SITE, cluster, request


def built(options: Mapping[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    return rayjob(cluster(**(options or {})), SITE, request(**parts))


def pod_specs(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    ray = manifest["spec"]["rayClusterSpec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def environment(pod: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


def test_g21_the_operator_neither_tries_again_nor_keeps_a_cluster() -> None:
    spec = built()["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["submissionMode"] == "HTTPMode"
    assert spec["shutdownAfterJobFinishes"]
    assert "activeDeadlineSeconds" not in spec
    assert not spec["suspend"]


def test_g19_the_full_names_are_in_annotations() -> None:
    job_id = "x" * 80
    metadata = built(job_id=job_id, name="n" * 60)["metadata"]
    assert len(metadata["name"]) <= 47
    assert metadata["annotations"]["planish.io/job-id"] == job_id
    assert metadata["annotations"]["planish.io/job-name"] == "n" * 60


@pytest.mark.parametrize(("nodes", "workers"), [(1, []), (2, [1]), (4, [3])])
def test_every_machine_is_a_pod_and_the_head_is_one(nodes: int, workers: list[int]) -> None:
    manifest = built(resources={"cluster": "k8s", "nodes": nodes, "gpus_per_node": 8})
    ray = manifest["spec"]["rayClusterSpec"]
    assert [group["replicas"] for group in ray["workerGroupSpecs"]] == workers
    for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"]):
        assert group["rayStartParams"]["num-gpus"] == "8"
        assert group["rayStartParams"]["num-cpus"] == "9"
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "8"


def test_a_head_serves_its_dashboard_to_the_operator_and_no_autoscaler() -> None:
    ray = built(resources={"cluster": "k8s", "nodes": 2})["spec"]["rayClusterSpec"]
    params = ray["headGroupSpec"]["rayStartParams"]
    assert params["dashboard-host"] == "0.0.0.0"
    assert params["no-monitor"] == "true"
    (workers,) = ray["workerGroupSpecs"]
    assert "dashboard-host" not in workers["rayStartParams"]


def test_without_gpus_each_pod_has_a_core_for_each_of_its_ranks() -> None:
    manifest = built(resources={"cluster": "k8s", "nodes": 2}, parallel={"tp": 3})
    ray = manifest["spec"]["rayClusterSpec"]
    assert ray["headGroupSpec"]["rayStartParams"]["num-cpus"] == "3"
    (head, _) = pod_specs(manifest)
    assert head["containers"][0]["resources"] == {"requests": {"cpu": "3"}, "limits": {}}


def test_what_is_put_aside_can_be_less_than_what_may_be_used() -> None:
    options = {"request_cpus": 0.5, "request_memory_gib": 1, "limit_cpus": True}
    asked = {"cluster": "k8s", "cpus_per_node": 8, "memory_gib_per_node": 32}
    (head,) = pod_specs(built(options, resources=asked))
    assert head["containers"][0]["resources"] == {
        "requests": {"cpu": "0.5", "memory": "1024Mi"},
        "limits": {"cpu": "8", "memory": "32768Mi"},
    }


def test_pods_are_restricted_where_the_operator_does_not_say_otherwise() -> None:
    for pod in pod_specs(built(resources={"cluster": "k8s", "nodes": 2, "gpus_per_node": 1})):
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "serviceAccountName" not in pod
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert mounts == {"/data": "jobs", "/tmp": "tmp", "/dev/shm": "shm"}


def test_with_a_queue_it_waits_for_kueue() -> None:
    asked = {"cluster": "k8s", "kubernetes": {"queue": "mine", "topology": "rack"}}
    for manifest, name in (
        (built({"queue": "research"}), "research"),
        (built({"queue": "research"}, resources=asked), "mine"),
    ):
        assert manifest["spec"]["suspend"] is True
        assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == name
    head = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    topology = head["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"]
    assert topology == "rack"
    assert "affinity" not in head["spec"]


def test_without_a_queue_the_pods_seek_each_others_topology() -> None:
    (head,) = pod_specs(built(resources={"cluster": "k8s", "kubernetes": {"topology": "rack"}}))
    (term,) = head["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "rack"
    assert term["labelSelector"]["matchLabels"]["planish.io/job"] == JOB


def test_a_job_adds_to_the_operators_placement_and_cannot_undo_it() -> None:
    options = {
        "node_selector": {"pool": "training"},
        "tolerations": [{"key": "gpu", "effect": "NoSchedule"}],
        "priority_class": "low",
    }
    wanted = {
        "node_selector": {"pool": "mine", "disk": "ssd"},
        "tolerations": [{"key": "spot", "operator": "Equal", "value": "yes"}],
        "priority_class": "high",
    }
    (head,) = pod_specs(built(options, resources={"cluster": "k8s", "kubernetes": wanted}))
    assert head["nodeSelector"] == {"pool": "training", "disk": "ssd"}
    assert head["tolerations"] == [
        {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Equal", "value": "yes"},
    ]
    assert head["priorityClassName"] == "high"


def test_g25_secrets_are_named_and_those_of_the_storage_go_only_where_it_is_used() -> None:
    options = {"env_from_secrets": ["tracker"], "storage_secrets": ["bucket"]}
    (plain,) = pod_specs(built(options))
    (stored,) = pod_specs(built(options, checkpoint={"storage": "s3://bucket/here"}))
    named = [
        [each["secretRef"]["name"] for each in pod["containers"][0]["envFrom"]]
        for pod in (plain, stored)
    ]
    assert named == [["tracker"], ["tracker", "bucket"]]


def test_g07_a_value_is_text_to_kubernetes_too() -> None:
    (head,) = pod_specs(built({"env": {"NCCL_DEBUG": "$(PATH) $HOME $(touch x)"}}))
    assert environment(head)["NCCL_DEBUG"] == "$$(PATH) $$HOME $$(touch x)"


def test_pods_know_their_attempt_and_how_long_they_may_take_to_end() -> None:
    asked = {"resources": {"cluster": "k8s", "nodes": 2, "gpus_per_node": 1}}
    head, worker = map(environment, pod_specs(built(faults={"grace_seconds": 60}, **asked)))
    assert pod_specs(built(faults={"grace_seconds": 60}))[0]["terminationGracePeriodSeconds"] == 80
    for each in (head, worker):
        assert (each["PLANISH_JOB_ID"], each["PLANISH_ATTEMPT"]) == (JOB, "1")
        assert each["PLANISH_DATA_ROOTS"] == "/data/rows"
        assert each["PLANISH_GRACE_SECONDS"] == "75"
    assert head["RAY_JOB_STOP_SIGNAL"] == "SIGINT"
    assert worker["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "75"


def test_metrics_are_the_heads() -> None:
    asked = {"cluster": "k8s", "nodes": 2, "gpus_per_node": 1}
    manifest = built({"metrics_port": 9464}, resources=asked)
    ray = manifest["spec"]["rayClusterSpec"]
    head, worker = ray["headGroupSpec"]["template"], ray["workerGroupSpecs"][0]["template"]
    assert head["metadata"]["annotations"]["prometheus.io/port"] == "9464"
    assert environment(head["spec"])["PLANISH_METRICS_PORT"] == "9464"
    assert "prometheus.io/port" not in worker["metadata"]["annotations"]
    assert "PLANISH_METRICS_PORT" not in environment(worker["spec"])


def test_what_people_are_shown_is_what_is_sent() -> None:
    manifest = built({"queue": "q"}, resources={"cluster": "k8s", "nodes": 2, "gpus_per_node": 1})
    text = as_yaml(manifest)
    assert yaml.safe_load(text) == manifest
    assert "&id" not in text
