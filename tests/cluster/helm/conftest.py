"""The real helm against the Kubernetes that KUBECONFIG names.

Where the control plane's image is needed, it must be in the node (tests/cluster/image builds it).
PLANISH_TEST_IMAGE names one that is; without it, and without the usual one, those tests skip. The
node must be on this machine, since tests give it folders of this machine as volumes. With
PLANISH_TEST_SOURCE the service runs the code of that folder, not the image's, so that work on the
code needs no new image.
"""

import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "planish"
IMAGE = os.environ.get("PLANISH_TEST_IMAGE", "localhost/planish:test")
USER = 10001
"""That of the image, and of `podSecurityContext`."""


@dataclass(frozen=True, slots=True)
class Programs:
    """helm and kubectl, both of this cluster."""

    helm_path: str
    kubectl_path: str

    def helm(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs helm; raises with its own words where it fails and `check` is set."""
        return _run([self.helm_path, *arguments], check=check)

    def kubectl(
        self, *arguments: str, given: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl, with `given` as its input."""
        return _run([self.kubectl_path, *arguments], given=given, check=check)

    def get(self, *arguments: str) -> Any:
        """What `kubectl get` prints as JSON."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)


def _run(
    command: list[str], *, given: str | None = None, check: bool
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=700)
    if check and done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


@pytest.fixture(scope="session")
def helm_path() -> str:
    fetched = subprocess.run(
        [str(ROOT / "scripts" / "helm_cli.sh")], capture_output=True, text=True, timeout=300
    )
    if fetched.returncode:
        pytest.skip(f"no helm: {fetched.stderr.strip()}")
    return fetched.stdout.strip()


@pytest.fixture(scope="session")
def programs(helm_path: str) -> Programs:
    config = os.environ.get("KUBECONFIG")
    if not config:
        pytest.skip("no Kubernetes: KUBECONFIG is not set")
    beside = Path(config).parent / "bin" / "kubectl"
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl in PATH")
    found = Programs(helm_path, kubectl)
    answer = found.kubectl("get", "--raw", "/readyz", check=False)
    if answer.returncode:
        pytest.skip(f"the Kubernetes of KUBECONFIG does not answer: {answer.stderr.strip()}")
    return found


@pytest.fixture(scope="session")
def control_plane(programs: Programs) -> Mapping[str, Any]:
    """Values of a small control plane from the image."""

    def known() -> bool:
        nodes = programs.get("nodes")["items"]
        kept = [image for node in nodes for image in node["status"].get("images", [])]
        return any(IMAGE in image.get("names", []) for image in kept)

    if "PLANISH_TEST_IMAGE" in os.environ:
        # A node says what it was given half a minute later.
        wait_until(known, f"the image {IMAGE} is in the node", 120)
    elif not known():
        pytest.skip(f"the image {IMAGE} is not in the node")
    repository, _, tag = IMAGE.rpartition(":")
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "resources": {
            "requests": {"cpu": "500m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        },
        "server": _source(),
    }


def _source() -> Mapping[str, Any]:
    folder = os.environ.get("PLANISH_TEST_SOURCE")
    if folder is None:
        return {}
    return {
        "env": [{"name": "PYTHONPATH", "value": folder}],
        "extraVolumes": [{"name": "source", "hostPath": {"path": folder}}],
        "extraVolumeMounts": [{"name": "source", "mountPath": folder, "readOnly": True}],
    }


@pytest.fixture
def namespace(programs: Programs) -> Iterator[str]:
    """A namespace of the test's own, which holds pods to the level "restricted" on paper."""
    name = f"helm-{uuid.uuid4().hex[:8]}"
    programs.kubectl("create", "namespace", name)
    yield name
    programs.kubectl("delete", "namespace", name, "--wait=false", check=False)


@pytest.fixture
def host_folder() -> Iterator[Path]:
    """An empty folder of this machine that pods of the image's user may write."""
    folder = Path(tempfile.mkdtemp(prefix="planish-helm-"))
    folder.chmod(0o711)
    data = folder / "data"
    data.mkdir(mode=0o700)
    os.chown(data, USER, USER)
    yield data
    shutil.rmtree(folder, ignore_errors=True)
