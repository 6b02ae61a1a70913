"""A namespace of the Kubernetes cluster that KUBECONFIG names, with its KubeRay operator and Kueue.

The pods run the tests' own Python: its environment, the interpreter that it links to and the
project's tree are volumes of the node at the same paths. So the node is this machine, and its
image needs nothing but a shell and the libraries of that Python.
"""

import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

try:
    import kubernetes
except ModuleNotFoundError:  # `skip_unless_there` says so
    kubernetes = None
from service.launchers.kuberay.config import KubeRayCluster
from service.launchers.kuberay.names import labels, parse_launcher_id, rayjob_name
from tests.cluster.sites.site import DRIVER, Patience, Site
from tests.cluster.sites.tcp_gate import Gate
from tests.waiting import wait_until

IMAGE = os.environ.get("PLANISH_TEST_KUBE_IMAGE", "localhost/python:3.12-slim")
TREE = Path(__file__).parents[3]
QUEUE = "jobs"
KUEUE = ("kueue.x-k8s.io", "v1beta2")
SECONDS = 120

RAY_NEEDS = ("aiohttp_cors", "grpc", "opentelemetry.exporter.prometheus")
"""Of `ray[default]`; without them Ray has no Jobs API, through which KubeRay starts a command."""


class Kubernetes:
    """The cluster, as its administrator sees it, and a namespace in it."""

    def __init__(self, namespace: str | None = None) -> None:
        """Of a namespace that somebody else made, or of one that `up` makes."""
        self.path = Path(os.environ["KUBECONFIG"])
        self._client = kubernetes.config.new_client_from_config(str(self.path))
        self.core = kubernetes.client.CoreV1Api(self._client)
        self.custom = kubernetes.client.CustomObjectsApi(self._client)
        self.namespace = namespace or f"planish-test-{secrets.token_hex(4)}"
        self.queue = self.namespace

    def up(self, *, queued: bool = True) -> None:
        """Makes the namespace, and a queue of its own that leads to all that the cluster has."""
        self.core.create_namespace({"metadata": {"name": self.namespace}})
        if not queued:
            return
        resources = [
            {"name": "cpu", "nominalQuota": "64"},
            {"name": "memory", "nominalQuota": "256Gi"},
        ]
        flavor: dict[str, Any] = {"name": self.queue, "resources": resources}
        cover = {"coveredResources": ["cpu", "memory"], "flavors": [flavor]}
        queue = {"namespaceSelector": {}, "resourceGroups": [cover]}
        self._make("ResourceFlavor", "resourceflavors", self.queue, {})
        self._make("ClusterQueue", "clusterqueues", self.queue, queue)
        self._make("LocalQueue", "localqueues", QUEUE, {"clusterQueue": self.queue})

    def down(self) -> None:
        """Leaves nothing behind."""
        self.core.delete_namespace(self.namespace)
        for plural in ("clusterqueues", "resourceflavors"):
            with suppress(kubernetes.client.exceptions.NotFoundException):
                self.custom.delete_cluster_custom_object(*KUEUE, plural, self.queue)
        wait_for(lambda: not self._has_namespace(), f"namespace {self.namespace} is gone")

    def hold(self, policy: str) -> None:
        """`Hold` admits nothing new from now on, `None` does again."""
        self.custom.patch_namespaced_custom_object(
            *KUEUE, self.namespace, "localqueues", QUEUE, {"spec": {"stopPolicy": policy}}
        )
        wait_for(lambda: self._is_active() is (policy == "None"), f"the queue has policy {policy}")

    def set_active(self, rayjob: str, active: bool) -> None:
        """Has Kueue evict a RayJob, or take it into its queue again."""
        found = wait_for(lambda: self._workload(rayjob), f"the workload of {rayjob}")
        self.custom.patch_namespaced_custom_object(
            *KUEUE,
            self.namespace,
            "workloads",
            found["metadata"]["name"],
            {"spec": {"active": active}},
        )

    def rayjob(self, name: str) -> Mapping[str, Any]:
        """A RayJob as it is."""
        found: Mapping[str, Any] = self.custom.get_namespaced_custom_object(
            "ray.io", "v1", self.namespace, "rayjobs", name
        )
        return found

    def pods(self, launcher_id: str, role: str | None = None) -> list[str]:
        """Names of an attempt's pods: of all, of the `head`, of a `worker`."""
        wanted = dict(labels(*parse_launcher_id(launcher_id)))
        if role is not None:
            wanted["ray.io/node-type"] = role
        selector = ",".join(f"{name}={value}" for name, value in wanted.items())
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector)
        return [pod.metadata.name for pod in found.items]

    def lose(self, pod: str) -> None:
        """A pod's end without a word to it, as when its machine goes."""
        self.core.delete_namespaced_pod(pod, self.namespace, grace_period_seconds=0)

    def delete(self, pod: str) -> None:
        """A pod's end as somebody's wish: it is told, and has its grace."""
        self.core.delete_namespaced_pod(pod, self.namespace)

    def _is_active(self) -> bool:
        found: Any = self.custom.get_namespaced_custom_object(
            *KUEUE, self.namespace, "localqueues", QUEUE
        )
        conditions = found.get("status", {}).get("conditions", [])
        return any(each["type"] == "Active" and each["status"] == "True" for each in conditions)

    def _workload(self, rayjob: str) -> Mapping[str, Any] | None:
        listed: Any = self.custom.list_namespaced_custom_object(*KUEUE, self.namespace, "workloads")
        for found in listed["items"]:
            if any(owner["name"] == rayjob for owner in found["metadata"]["ownerReferences"]):
                return dict(found)
        return None

    def _has_namespace(self) -> bool:
        return any(n.metadata.name == self.namespace for n in self.core.list_namespace().items)

    def _make(self, kind: str, plural: str, name: str, spec: Mapping[str, Any]) -> None:
        """Makes an object of Kueue's, as soon as Kueue is well enough to look at it."""
        body = self._kueue(kind, name, spec)

        def made() -> bool:
            try:
                if kind == "LocalQueue":
                    self.custom.create_namespaced_custom_object(
                        *KUEUE, self.namespace, plural, body
                    )
                else:
                    self.custom.create_cluster_custom_object(*KUEUE, plural, body)
            except kubernetes.client.exceptions.ServiceException:
                return False  # its webhook does not answer
            return True

        wait_for(made, f"Kueue takes a {kind}")

    @staticmethod
    def _kueue(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "apiVersion": "/".join(KUEUE),
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }


class KubeRaySite(Site):
    """Kubernetes, reached through a gate."""

    kind = "kuberay"
    patience = Patience(start=420, end=180, again=420)
    memory_limit_gib = 2.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resources = {"cluster": "kube"}
        self.cannot = {}
        self.kube = Kubernetes()
        self._gate, gated = _gated(self.kube.path, folder / "kubeconfig")
        self.cluster = cluster_for(folder, self.kube.namespace, kubeconfig=gated)

    @contextmanager
    def fill(self) -> Iterator[None]:
        """Kueue admits nothing."""
        self.kube.hold("Hold")
        try:
            yield
        finally:
            self.kube.hold("None")

    def preempt(self, launcher_id: str) -> None:
        """Kueue evicts it, and would admit it again."""
        name = rayjob_name(*parse_launcher_id(launcher_id))
        self.kube.set_active(name, False)
        wait_for(lambda: self.kube.rayjob(name)["spec"].get("suspend"), f"{name} is suspended")

    def lose_node(self, launcher_id: str) -> None:
        """The pod of head and driver is gone without a word to it, as with its machine."""
        (head,) = self.kube.pods(launcher_id, "head")
        self.kube.lose(head)

    @contextmanager
    def away(self) -> Iterator[None]:
        """The API server does not answer to the service."""
        with self._gate.closed():
            yield

    def up(self) -> None:
        self.kube.up()

    def down(self) -> None:
        self._gate.close()
        self.kube.down()


def open_site(folder: Path) -> Iterator[Site]:
    skip_unless_there()
    site = KubeRaySite(folder)
    site.up()
    try:
        yield site
    finally:
        site.down()


def skip_unless_there() -> None:
    """Skips, with a plain reason, where this machine has no such cluster."""
    if not Path(os.environ.get("KUBECONFIG", "")).is_file():
        pytest.skip("KUBECONFIG names no Kubernetes cluster")
    for module in ("kubernetes", *RAY_NEEDS):
        with suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                continue
        pytest.skip(f"this Python has no {module} (planish[kubernetes] and ray[default])")
    found = Kubernetes()
    have = {
        group.name
        for group in kubernetes.client.ApisApi(found.core.api_client).get_api_versions().groups
    }
    missing = {"ray.io", KUEUE[0]} - have
    if missing:
        pytest.skip(f"the cluster of KUBECONFIG has no {' and no '.join(sorted(missing))}")


def cluster_for(
    folder: Path, namespace: str, *, kubeconfig: Path, python: Path = DRIVER, **more: Any
) -> KubeRayCluster:
    """An operator's config, for pods that run this Python with `folder` as the jobs' volume."""
    return KubeRayCluster.model_validate(
        {
            "type": "kuberay",
            "kubeconfig": str(kubeconfig),
            "namespace": namespace,
            "image": IMAGE,
            "image_pull_policy": "Never",
            "python": str(python),
            "run_as_user": os.getuid(),
            "volumes": _volumes(folder),
            "env": {
                "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                "RAY_enable_worker_prestart": "0",
            },
            "shm_gib": 0.5,
            "request_cpus": 0.2,
            "request_memory_gib": 0.25,
            "queue": QUEUE,
            "poll_seconds": 0.2,
            "keep_finished_seconds": 60,
            "termination_seconds": 40,
            **more,
        }
    )


def wait_for[Found](look: Callable[[], Found | None], what: str, seconds: float = SECONDS) -> Found:
    """`wait_until` with a limit for pods, and without haste: the cluster shares the machine."""
    return wait_until(look, what, seconds, pause=0.2)


def _volumes(folder: Path) -> list[dict[str, Any]]:
    """The jobs, this Python, and the project, each where it is here."""
    code = [TREE, Path(sys.prefix), Path(sys.base_prefix)]
    code += [Path(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    shared = [
        path
        for path in dict.fromkeys(code)
        if path != Path("/usr") and not any(path.is_relative_to(o) for o in code if o != path)
    ]
    return [
        {"name": "jobs", "mount_path": str(folder), "host_path": str(folder)},
        *(
            {
                "name": f"code-{number}",
                "mount_path": str(path),
                "host_path": str(path.resolve()),
                "read_only": True,
            }
            for number, path in enumerate(shared)
        ),
    ]


def _gated(kubeconfig: Path, copy: Path) -> tuple[Gate, Path]:
    """A gate before the API server, and a kubeconfig that goes through it."""
    document = yaml.safe_load(kubeconfig.read_text())
    (cluster,) = document["clusters"]
    server = urlsplit(cluster["cluster"]["server"])
    assert server.hostname is not None
    gate = Gate(server.hostname, server.port or 443)
    cluster["cluster"]["tls-server-name"] = server.hostname
    cluster["cluster"]["server"] = f"https://127.0.0.1:{gate.port}"
    copy.write_text(yaml.safe_dump(document))
    copy.chmod(0o600)
    return gate, copy
