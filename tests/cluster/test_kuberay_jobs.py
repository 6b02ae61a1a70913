"""KubeRay beyond the suite that holds every cluster: manifests, faults at the start, whole jobs.

A whole job here is trained by the project's own driver on pods of a real node, and loses in turn a
worker's pod, its head's pod, and its place in Kueue's queue. What it learns is what the same job
learns on this machine in peace.
"""

import json
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quickstart.model import build_config, build_tokenizer
from service.client import Client
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
from tests.end_to_end.conftest import ROWS_A_STEP
from tests.end_to_end.service_process import ServiceProcess
from tests.service.store.sample_jobs import document

pytestmark = pytest.mark.cluster

STEPS = 60
UP_SECONDS = 420
STARTUP_SECONDS = 30


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
    """How an attempt that cannot start ends, once nothing of it is left."""
    launcher.submit(request)
    name = launcher.identify(request.job_id, 1)

    def ended() -> Observation | None:
        seen = launcher.poll(name)
        assert seen.phase in (Phase.QUEUED, Phase.EXITED), seen
        if seen.leftovers:
            launcher.cancel(name, 0.0)
        return seen if seen.phase is Phase.EXITED and not seen.leftovers else None

    found = wait_for(ended, "it has failed, and nothing of it is left")
    assert found is not None
    assert not (request.job_dir / "starts").exists()
    return found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "localhost/no-such-image:1"}, "ErrImageNeverPull"),
        ({"node_selector": {"planish.io/no-such": "node"}}, "Unschedulable"),
        ({"extra_resources": {"example.com/gpu": 8}}, "Insufficient example.com/gpu"),
        ({"env_from_secrets": ["no-such-secret"]}, "no-such-secret"),
    ],
)
def test_g09_what_cannot_start_ends_with_its_pods_reason(
    kube: Kubernetes, folder: Path, options: dict[str, Any], said: str
) -> None:
    launcher = launcher_of_failures(kube, folder, **options)
    request = request_for(document(), folder)
    try:
        seen = launch_failure(launcher, unqueued(request))
        assert kube.pods(launcher.identify(request.job_id, 1)) == []
    finally:
        launcher.close()
    assert seen.reason is Reason.LAUNCH_FAILED
    assert f"did not start within {STARTUP_SECONDS} s" in seen.evidence
    assert said in seen.evidence


def test_g09_a_quota_that_is_used_up_is_told(kube: Kubernetes, folder: Path) -> None:
    launcher = launcher_of_failures(kube, folder)
    quota: Any = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    kube.core.create_namespaced_resource_quota(kube.namespace, quota)
    try:
        seen = launch_failure(launcher, unqueued(request_for(document(), folder)))
    finally:
        kube.core.delete_namespaced_resource_quota("none", kube.namespace)
        launcher.close()
    assert seen.reason is Reason.LAUNCH_FAILED
    assert "exceeded quota" in seen.evidence


def test_a_rayjob_that_the_operator_refuses_is_no_mystery(kube: Kubernetes, folder: Path) -> None:
    # The API server takes a class of priority that is not there; the pods' admission does not.
    launcher = launcher_of_failures(kube, folder, priority_class="no-such")
    try:
        seen = launch_failure(launcher, unqueued(request_for(document(), folder)))
    finally:
        launcher.close()
    assert seen.reason is Reason.LAUNCH_FAILED
    assert "no-such" in seen.evidence


def unqueued(request: LaunchRequest) -> LaunchRequest:
    """The same, not for Kueue."""
    spec = request.context.spec
    resources = spec.resources.model_copy(update={"kubernetes": None})
    plain = spec.model_copy(update={"resources": resources})
    return replace(request, context=request.context.model_copy(update={"spec": plain}))


@pytest.fixture(scope="module")
def trained_on(folder: Path) -> tuple[Path, Path]:
    """A small model without weights, and rows to train it on, where pods see them."""
    model, rows = folder / "model", folder / "rows.jsonl"
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    config = build_config(tokenizer) | {"hidden_size": 32, "intermediate_size": 64}
    (model / "config.json").write_text(json.dumps(config))
    with rows.open("w") as file:
        for number in range(100):
            question = {"role": "user", "content": f"State the answer: {number} + 1 ="}
            answer = {"role": "assistant", "content": str(number + 1)}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return model, rows


@pytest.fixture
def service(
    kube: Kubernetes, folder: Path, trained_on: tuple[Path, Path]
) -> Iterator[ServiceProcess]:
    """A service with two clusters: this machine, and the pods."""
    config = cluster_for(folder, kube.namespace, kubeconfig=kube.path, python=Path(sys.executable))
    clusters = {
        "local": {"type": "local", "max_jobs": 1},
        "kube": config.model_dump(mode="json", exclude_none=True),
    }
    (folder / "clusters.yaml").write_text(yaml.safe_dump({"clusters": clusters}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = ServiceProcess(
        folder,
        port=port,
        model_root=trained_on[0],
        options=["--clusters", str(folder / "clusters.yaml")],
    )
    running.start()
    yield running
    running.stop()


def sft(model: Path, file_id: str, cluster: str, **more: Any) -> dict[str, Any]:
    """A job of two data-parallel groups of two tensor-parallel ranks."""
    config = json.loads((model / "config.json").read_text())
    return {
        "name": f"on-{cluster}",
        "model": {"init": {"config": config, "tokenizer": str(model)}},
        "algorithm": {"type": "sft"},
        "data": {"train": file_id},
        "parallel": {"tp": 2, "dp": 2},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
        "checkpoint": {"every_steps": 5, "export": False},
        "resources": {"cluster": cluster, **more},
    }


def until_step(folder: Path, job_id: str, step: int) -> None:
    """Until a checkpoint of that step or a later one is published."""
    latest = folder / "data/jobs" / job_id / "checkpoints/latest"

    def reached() -> bool:
        return latest.exists() and int(latest.read_text().rpartition("-")[2]) >= step

    wait_for(reached, f"step {step} is published", UP_SECONDS)


def learned(client: Client, job_id: str) -> dict[int, float]:
    """The loss of each step that counts."""
    return {row.step: row.values["loss"] for row in client.metrics(job_id)}


@pytest.mark.long
def test_a_job_that_loses_worker_head_and_place_learns_the_same_as_one_in_peace(
    kube: Kubernetes, folder: Path, trained_on: tuple[Path, Path], service: ServiceProcess
) -> None:
    model, rows = trained_on
    with service.client() as client:
        file = client.upload(rows)
        calm = client.submit(sft(model, file.id, "local"))
        job = client.submit(sft(model, file.id, "kube", nodes=2))
        until_step(folder, job.id, 5)
        (worker,) = kube.pods(f"{job.id}/1", "worker")
        kube.lose(worker)
        until_step(folder, job.id, 15)
        first = len(client.job(job.id).attempts)
        kube.lose(kube.pods(f"{job.id}/{first}", "head")[0])
        until_step(folder, job.id, 30)
        second = len(client.job(job.id).attempts)
        kube.set_active(rayjob_name(job.id, second), False)
        for ended in (calm, job):
            for _ in client.events(ended.id):
                pass
        calm_job, ended_job = client.job(calm.id), client.job(job.id)
        assert calm_job.state.value == "SUCCEEDED", calm_job.message
        assert ended_job.state.value == "SUCCEEDED", ended_job.message
        reasons = [attempt.reason for attempt in ended_job.attempts]
        assert reasons[first - 1] is Reason.NODE_FAILURE, reasons
        assert reasons[second - 1] is Reason.PREEMPTED, reasons
        assert reasons[-1] is None
        losses = learned(client, job.id)
        assert sorted(losses) == list(range(1, STEPS + 1))
        assert losses == pytest.approx(learned(client, calm.id), rel=1e-5)
    gone = [kube.pods(f"{job.id}/{attempt}") for attempt in range(1, len(reasons) + 1)]
    assert gone == [[]] * len(reasons)
