"""What the chart renders is taken by validators that know every field, and by the API server."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.cli.server import _DRAIN_SECONDS
from tests.cluster.helm.conftest import CHART, Programs

pytestmark = pytest.mark.cluster

VALUE_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
KUBERNETES = "1.34"
OWN_GROUPS = ("monitoring.coreos.com/", "kueue.x-k8s.io/", "gateway.networking.k8s.io/")
RESTRICTED_LEAVES_OUT = {"hostPath", "nfs"}
"""Kinds of volumes that the level "restricted" does not have, and that a user may choose."""


def _render(programs: Programs, *arguments: str) -> list[dict[str, Any]]:
    text = programs.helm("template", "trial", str(CHART), "--namespace", "trial", *arguments).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def _pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pods = [d["spec"] for d in documents if d["kind"] == "Pod"]
    return pods + [
        d["spec"]["template"]["spec"]
        for d in documents
        if d["kind"] in {"Deployment", "StatefulSet", "Job"}
    ]


def test_there_are_ten_value_files_and_more() -> None:
    assert len(VALUE_FILES) >= 10


def test_the_chart_is_linted_with_all_value_files(programs: Programs) -> None:
    for arguments in ([], *(["-f", str(path)] for path in VALUE_FILES)):
        programs.helm("lint", "--strict", str(CHART), *arguments)


@pytest.mark.parametrize("path", VALUE_FILES, ids=lambda path: path.stem)
class TestValueFile:
    def test_every_object_is_valid_to_the_last_field(self, programs: Programs, path: Path) -> None:
        documents = _render(programs, "-f", str(path))
        builtin = [d for d in documents if not d["apiVersion"].startswith(OWN_GROUPS)]
        assert {"Deployment", "Service", "ConfigMap"} <= {d["kind"] for d in builtin}
        for document in builtin:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)

    def test_the_api_server_takes_it(self, programs: Programs, namespace: str, path: Path) -> None:
        # One namespace for all, as a dry run makes none.
        text = programs.helm(
            "template", "trial", str(CHART), "--namespace", namespace, "-f", str(path),
            "--set", "workers.namespace=",
        ).stdout  # fmt: skip
        documents = [
            document
            for document in yaml.safe_load_all(text)
            # The Gateway API's definitions are not among this cluster's.
            if document and document["kind"] != "HTTPRoute"
        ]
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
        done = programs.kubectl(
            "create", "--namespace", namespace, "--dry-run=server", "--validate=strict", "-f", "-",
            given=given,
        )  # fmt: skip
        assert len(done.stdout.splitlines()) == len(documents)

    def test_every_pod_is_restricted(self, programs: Programs, path: Path) -> None:
        for pod in _pods(_render(programs, "-f", str(path))):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
            for container in pod["containers"]:
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["readOnlyRootFilesystem"] is True
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert "limits" in container["resources"]
            kinds = {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}}
            assert kinds - RESTRICTED_LEAVES_OUT <= {
                "configMap", "emptyDir", "persistentVolumeClaim", "secret",
            }  # fmt: skip


def test_slurm_alone_needs_no_right_in_kubernetes(programs: Programs) -> None:
    documents = _render(programs, "-f", str(CHART / "ci" / "slurm-values.yaml"))
    assert not {"Role", "RoleBinding"} & {d["kind"] for d in documents}
    assert not any(pod.get("automountServiceAccountToken") for pod in _pods(documents))


def test_rights_are_those_of_the_launcher_and_no_more(programs: Programs) -> None:
    documents = _render(programs)
    assert not {"ClusterRole", "ClusterRoleBinding"} & {d["kind"] for d in documents}
    (role,) = [d for d in documents if d["kind"] == "Role"]
    granted = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        *(("rayjobs", verb) for verb in ("create", "get", "list", "watch", "delete")),
        *(("pods", verb) for verb in ("list", "watch", "delete")),
        ("events", "list"),
    }


def test_no_secret_is_outside_of_secrets(programs: Programs) -> None:
    documents = _render(programs, "-f", str(CHART / "ci" / "autoscaling-values.yaml"))
    others = [d for d in documents if d["kind"] != "Secret"]
    assert "secret@" not in json.dumps(others)
    assert any("database" in d["metadata"]["name"] for d in documents if d["kind"] == "Secret")


def _checksum(programs: Programs, of: str, *arguments: str) -> str:
    (deployment,) = [d for d in _render(programs, *arguments) if d["kind"] == "Deployment"]
    found: str = deployment["spec"]["template"]["metadata"]["annotations"][f"checksum/{of}"]
    return found


def test_other_clusters_make_another_pod(programs: Programs) -> None:
    def checksum(*arguments: str) -> str:
        return _checksum(programs, "clusters", *arguments)

    assert checksum() == checksum("--set", "service.port=9000")
    assert checksum() != checksum("--set", "workers.image.tag=v2")


def test_another_database_makes_another_pod(programs: Programs) -> None:
    def checksum(password: str) -> str:
        url = f"database.url=postgresql://planish:{password}@postgres.example.org/planish"
        return _checksum(programs, "database", "--set", url)

    assert checksum("old") == checksum("old")
    assert checksum("old") != checksum("new")


def test_drivers_metrics_are_open_at_each_clusters_own_port(programs: Programs) -> None:
    def ports(*more: str) -> list[int]:
        documents = _render(
            programs, "--set", "networkPolicy.enabled=true", "--set", "clusters.a.type=kuberay",
            "--set", "clusters.b.type=kuberay,clusters.b.metrics_port=9500",
            "--set", "clusters.c.type=kuberay,clusters.c.metrics_port=9600,clusters.c.namespace=c",
            "--set", "workers.existingClaim=jobs", *more,
        )  # fmt: skip
        (policy,) = [
            d
            for d in documents
            if d["kind"] == "NetworkPolicy" and d["metadata"]["name"].endswith("-workers")
            if d["metadata"]["namespace"] == "trial"
        ]
        anybody = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]
        return [port["port"] for rule in anybody for port in rule["ports"]]

    assert ports() == [9500]
    assert ports("--set", "metrics.podMonitor.enabled=true") == [9464, 9500]


def test_drivers_are_scraped_as_without_prometheus_operator(programs: Programs) -> None:
    """That relabelling is tested with a real Prometheus (tests/cluster/prometheus)."""
    plain = yaml.safe_load((CHART.parents[1] / "deploy/prometheus/kubernetes.yml").read_text())
    (drivers,) = [c for c in plain["scrape_configs"] if c["job_name"] == "planish-drivers"]
    path = str(CHART / "ci" / "monitoring-values.yaml")
    (monitor,) = [d for d in _render(programs, "-f", path) if d["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    # A filter by port would find none: pods declare no port for metrics.
    assert not {"port", "portNumber", "targetPort"} & endpoint.keys()
    found = [
        {
            "source_labels": rule["sourceLabels"],
            "regex": rule["regex"],
            **({"action": "keep"} if rule["action"] == "keep" else {}),
            **({"separator": rule["separator"]} if "separator" in rule else {}),
            **({"target_label": rule["targetLabel"]} if "targetLabel" in rule else {}),
        }
        for rule in endpoint["relabelings"]
    ]
    assert found == drivers["relabel_configs"][:2]


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ("replicas=1", "Recreate"),  # on SQLite
        ("postgresql.enabled=true", "RollingUpdate"),
        ("postgresql.enabled=true,storage.claim.accessModes={ReadWriteOnce}", "Recreate"),
        (
            "postgresql.enabled=true,storage.claim.existing=shared,"
            "storage.claim.accessModes={ReadWriteOnce}",
            "RollingUpdate",
        ),
    ],
)
def test_an_upgrade_does_not_wait_for_a_disk_that_the_old_pod_has(
    programs: Programs, values: str, strategy: str
) -> None:
    documents = _render(programs, "--set", values)
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    assert deployment["spec"]["strategy"]["type"] == strategy


def test_a_pod_serves_on_until_nobody_sends_it_requests(programs: Programs) -> None:
    documents = _render(programs, "--set", "terminationGracePeriodSeconds=15")
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    (service,) = deployment["spec"]["template"]["spec"]["containers"]
    program, seconds = service["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    # What is under way then has its time as well (service/cli/server.py).
    assert 3 <= int(seconds) <= 15 - 2 * _DRAIN_SECONDS


def test_the_quota_is_for_the_queue_that_the_chart_makes(programs: Programs) -> None:
    gpus = "kueue.create=true,clusters.a.type=kuberay,clusters.a.gpus_per_node=8"
    for more in (r"kueue.quota.nvidia\.com/gpu=8", "clusters.a.queue=others"):
        assert _render(programs, "--set", f"{gpus},{more}")


WRONG = {
    "a value that is not there": ("foo=1", "foo"),
    "no replica": ("replicas=0", "replicas"),
    "a wrong type": ("replicas=many", "replicas"),
    "two processes on SQLite": ("replicas=2", "PostgreSQL"),
    "scaling on SQLite": ("autoscaling.enabled=true", "PostgreSQL"),
    "many replicas on a disk of one node": (
        "replicas=2,postgresql.enabled=true,storage.claim.accessModes={ReadWriteOnce}",
        "ReadWriteMany",
    ),
    "two databases": ("postgresql.enabled=true,database.url=postgresql://x", "choose one"),
    "another kind of database": ("database.url=mysql://x", "database.url"),
    "a policy that is none": ("image.pullPolicy=Sometimes", "pullPolicy"),
    "a relative path": ("storage.path=data", "storage.path"),
    "NFS without a server": ("storage.type=nfs", "storage"),
    "workers on bare NFS": (
        "storage.type=nfs,storage.nfs.server=a,storage.nfs.path=/b",
        "storage.claim.existing",
    ),
    "a hostPath without a path": ("storage.type=hostPath", "storage"),
    "an Ingress without hosts": ("ingress.enabled=true", "ingress.hosts"),
    "a route without a Gateway": ("gateway.enabled=true", "gateway.parentRefs"),
    "a port beyond ports": ("service.port=70000", "service.port"),
    "root": ("podSecurityContext.runAsUser=0", "runAsUser"),
    "a cluster's name that jobs cannot give": ("clusters.A.type=slurm", "clusters"),
    "a cluster without a type": ("clusters.a.partition=gpu", "type"),
    "a cluster's option that is not there": ("clusters.a.type=slurm,clusters.a.foo=1", "foo"),
    "drivers on the control plane's pod": ("clusters.a.type=local", "clusters.a"),
    "queues for nobody": ("kueue.create=true,clusters.a.type=slurm", "kueue"),
    "GPUs that the quota has none of": (
        "kueue.create=true,clusters.a.type=kuberay,clusters.a.gpus_per_node=8",
        "nvidia.com/gpu",
    ),
    "GPUs by another name": (
        "kueue.create=true,clusters.a.type=kuberay,clusters.a.gpus_per_node=8,"
        "clusters.a.gpu_resource=amd.com/gpu,kueue.quota.nvidia\\.com/gpu=8",
        "amd.com/gpu",
    ),
    "a device that the quota has none of": (
        "kueue.create=true,clusters.a.type=kuberay,clusters.a.extra_resources.rdma/hca=1",
        "rdma/hca",
    ),
    "jobs elsewhere without their volume": ("workers.namespace=other", "workers.existingClaim"),
    "the key as a plain variable": ("server.env[0].name=PLANISH_BOOTSTRAP_KEY", "server.env"),
    "a quantity that is none": ("storage.claim.size=much", "storage.claim.size"),
    "a grace shorter than requests get": ("terminationGracePeriodSeconds=5", "termination"),
}


@pytest.mark.parametrize(("setting", "words"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values_are_refused(programs: Programs, setting: str, words: str) -> None:
    done = programs.helm("template", "trial", str(CHART), "--set", setting, check=False)
    assert done.returncode != 0
    assert words in done.stderr
