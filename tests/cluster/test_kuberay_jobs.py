"""KubeRay beyond the suite that holds every cluster: manifests, and faults at the start.

Whole jobs in pods are in tests/cluster/helm/test_whole.py.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.jobs import new_job_id
from service.launchers import LaunchRequest, Observation, Phase, Site
from service.launchers.kuberay.client import Api, Refused
from service.launchers.kuberay.launcher import KubeRayLauncher
from service.launchers.kuberay.manifest import rayjob
from service.launchers.kuberay.names import rayjob_name
from service.spec import JobContext, JobSpec, Reason, ResolvedModel
from tests.cluster.sites.kuberay import (
    TREE,
    Kubernetes,
    cluster_for,
    skip_unless_there,
    wait_for,
)
from tests.service.store.sample_jobs import document

pytestmark = pytest.mark.cluster

STARTUP_SECONDS = 90
HINDRANCES: dict[str, dict[str, Any]] = {
    "ErrImageNeverPull": {"image": "localhost/no-such-image:1"},
    "Unschedulable": {"node_selector": {"planish.io/no-such": "node"}},
    "Insufficient example.com/gpu": {"extra_resources": {"example.com/gpu": 8}},
    "no-such-secret": {"env_from_secrets": ["no-such-secret"]},
    # The API server takes a class of priority that is not there; the pods' admission does not.
    "no PriorityClass with name no-such": {"priority_class": "no-such"},
}
"""What the reason for an attempt that cannot start must say, by the options that hinder it."""


@pytest.fixture(scope="module")
def kube() -> Iterator[Kubernetes]:
    """A namespace of its own with a queue."""
    skip_unless_there()
    made = Kubernetes()
    made.up()
    yield made
    made.down()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that pods see under the same path."""
    with tempfile.TemporaryDirectory(prefix="planish-kube-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def launcher_for(kube: Kubernetes, folder: Path, **options: Any) -> KubeRayLauncher:
    config = cluster_for(folder, kube.namespace, kubeconfig=kube.path, **options)
    return config.open(Site(jobs_dir=folder / "jobs"))


def launcher_of_failures(kube: Kubernetes, folder: Path, **options: Any) -> KubeRayLauncher:
    """For attempts that never start, and so need no room."""
    return launcher_for(
        kube, folder, startup_seconds=STARTUP_SECONDS, queue=None, request_cpus=0.01, **options
    )


def example_documents() -> dict[str, dict[str, Any]]:
    """Every job document in the pages, by where it stands."""
    found = {}
    for page in sorted([TREE / "README.md", *(TREE / "docs").rglob("*.md")]):
        for block in re.findall(r"```ya?ml\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for shown in yaml.safe_load_all(block):
                if isinstance(shown, dict) and {"model", "algorithm"} <= shown.keys():
                    found[f"{page.relative_to(TREE)}#{len(found)}"] = shown
    return found


def request_for(shown: dict[str, Any], folder: Path) -> LaunchRequest:
    """What would be launched of a document, on this kind of cluster."""
    resources = {k: v for k, v in shown.get("resources", {}).items() if k != "slurm"}
    resources["kubernetes"] = {**(resources.get("kubernetes") or {}), "queue": "jobs"}
    spec = JobSpec.model_validate({**shown, "resources": resources})
    model = ResolvedModel(kind="huggingface", config={}, tokenizer="t", weights="w")
    job_id = new_job_id()
    return LaunchRequest(
        job_id=job_id,
        attempt=1,
        job_dir=folder / "jobs" / job_id,
        context=JobContext(job_id=job_id, spec=spec, dp=1, model=model),
    )


def test_the_api_server_and_the_operator_take_every_example(kube: Kubernetes, folder: Path) -> None:
    examples = example_documents()
    assert len(examples) >= 15, list(examples)
    requests = {where: request_for(shown, folder) for where, shown in examples.items()}
    launcher = launcher_for(kube, folder)
    kube.hold("Hold")  # none of them may start
    try:
        for request in requests.values():
            launcher.submit(request)  # strict: an unknown field would be refused
        for where, request in requests.items():
            name = rayjob_name(request.job_id, 1)
            assert wait_for(lambda n=name: operators_word(kube, n), where) == "Suspended"  # type: ignore[misc]
            seen = launcher.poll(launcher.identify(request.job_id, 1))
            assert seen.phase is Phase.QUEUED, (where, seen)
    finally:
        for request in requests.values():
            launcher.cancel(launcher.identify(request.job_id, 1), 0.0)
        kube.hold("None")
        launcher.close()


def operators_word(kube: Kubernetes, name: str) -> str | None:
    """What the operator makes of a RayJob that is suspended, once it has made up its mind."""
    word: str = (kube.rayjob(name).get("status") or {}).get("jobDeploymentStatus", "")
    return word if word in ("Suspended", "ValidationFailed") else None


def test_an_unknown_field_is_refused(kube: Kubernetes, folder: Path) -> None:
    config = cluster_for(folder, kube.namespace, kubeconfig=kube.path)
    site, request = Site(jobs_dir=folder / "jobs"), request_for(document(), folder)
    api = Api(config.namespace, kubeconfig=config.kubeconfig)
    api.create_rayjob(rayjob(config, site, request), dry_run=True)
    misspelt = rayjob(config, site, request)
    misspelt["spec"]["rayClusterSpec"]["headGroupSpec"]["wroker"] = 1
    with pytest.raises(Refused, match="wroker"):
        api.create_rayjob(misspelt, dry_run=True)
    assert api.get_rayjob(rayjob_name(request.job_id, 1)) is None
    api.close()


def launch_failure(launcher: KubeRayLauncher, request: LaunchRequest) -> Observation:
    """How an attempt that was submitted and cannot start ends, once nothing of it is left."""
    name = launcher.identify(request.job_id, 1)

    def ended() -> Observation | None:
        seen = launcher.poll(name)
        assert seen.phase in (Phase.QUEUED, Phase.EXITED), seen
        if seen.leftovers:
            launcher.cancel(name, 0.0)
        return seen if seen.phase is Phase.EXITED and not seen.leftovers else None

    limit = STARTUP_SECONDS + 180
    found = wait_for(ended, "it has failed, and nothing of it is left", limit)
    assert found is not None
    assert not (request.job_dir / "starts").exists()
    return found


@pytest.fixture(scope="module")
def hindered(
    kube: Kubernetes, folder: Path
) -> Iterator[dict[str, tuple[KubeRayLauncher, LaunchRequest]]]:
    """Attempts that cannot start, all submitted at once, since each takes as long as it may."""
    found = {}
    for said, options in HINDRANCES.items():
        launcher = launcher_of_failures(kube, folder, **options)
        request = unqueued(request_for(document(), folder))
        launcher.submit(request)
        found[said] = launcher, request
    yield found
    for launcher, _ in found.values():
        launcher.close()


@pytest.mark.parametrize("said", HINDRANCES)
def test_g09_what_cannot_start_ends_with_its_pods_reason(
    kube: Kubernetes,
    hindered: dict[str, tuple[KubeRayLauncher, LaunchRequest]],
    said: str,
) -> None:
    launcher, request = hindered[said]
    seen = launch_failure(launcher, request)
    assert kube.pods(launcher.identify(request.job_id, 1)) == []
    assert seen.reason is Reason.LAUNCH_FAILED
    assert f"did not start within {STARTUP_SECONDS} s" in seen.evidence
    assert said in seen.evidence


def test_g09_a_quota_that_is_used_up_is_told(kube: Kubernetes, folder: Path) -> None:
    launcher = launcher_of_failures(kube, folder)
    quota: Any = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    kube.core.create_namespaced_resource_quota(kube.namespace, quota)
    request = unqueued(request_for(document(), folder))
    try:
        launcher.submit(request)
        seen = launch_failure(launcher, request)
    finally:
        kube.core.delete_namespaced_resource_quota("none", kube.namespace)
        launcher.close()
    assert seen.reason is Reason.LAUNCH_FAILED
    assert "exceeded quota" in seen.evidence


def unqueued(request: LaunchRequest) -> LaunchRequest:
    """The same, not for Kueue."""
    spec = request.context.spec
    resources = spec.resources.model_copy(update={"kubernetes": None})
    plain = spec.model_copy(update={"resources": resources})
    return replace(request, context=request.context.model_copy(update={"spec": plain}))
