"""The whole thing in Kubernetes, as a user has it.

The control plane's image is installed by helm. A job sent to its Service becomes a RayJob by the
chart's Role alone, is admitted by Kueue, and trains in pods of its own, while the control plane is
upgraded. The same job then loses its head's pod, a worker's pod, and its place in Kueue's queue,
and becomes what the first did. GRPO goes on from it.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from quickstart.model import build_config, build_tokenizer
from service.api.resources import JobResource
from service.client import Client
from service.launchers.kuberay.names import rayjob_name
from tests.cluster.helm import workers
from tests.cluster.helm.conftest import CHART, USER, Programs
from tests.cluster.helm.release import WAIT, Release
from tests.cluster.prometheus.pods import discovered
from tests.cluster.prometheus.server import (
    Prometheus,
    assert_scraped,
    in_kubernetes,
    prometheus,
)
from tests.cluster.sites.kuberay import Kubernetes, skip_unless_there
from tests.cluster.whole_jobs import assert_as_calm, ended, grpo_job, until_checkpoint
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

STEPS, SAVE_EVERY, ROWS_A_STEP = 150, 5, 10
"""So many that a job is at it still when its third attempt is evicted, which takes some seconds."""


@pytest.fixture
def release(
    programs: Programs,
    namespace: str,
    tmp_path: Path,
    control_plane: Mapping[str, Any],
    host_folder: Path,
) -> Iterator[Release]:
    skip_unless_there()
    made = Release(programs=programs, namespace=namespace, values=tmp_path / "values.yaml")
    made.write(_values(control_plane, host_folder))
    yield made
    made.helm("uninstall", "--ignore-not-found", "--wait", check=False)


def _values(control_plane: Mapping[str, Any], host_folder: Path) -> dict[str, Any]:
    kubeconfig = Path(os.environ["KUBECONFIG"])
    return {
        **control_plane,
        "storage": {
            "type": "hostPath",
            "path": str(host_folder),
            "hostPath": {"path": str(host_folder)},
        },
        "clusters": {
            "kubernetes": {
                **workers.options(host_folder.parent, kubeconfig),
                "metrics_port": 9464,
            }
        },
        # This machine has fewer cores than the jobs ask for; Kueue does not know.
        "kueue": {"create": True, "quota": {"cpu": "64", "memory": "256Gi"}},
    }


@pytest.fixture
def server(release: Release, tmp_path: Path) -> Iterator[Prometheus | None]:
    """A Prometheus in the node's network; null where the node has none that can be entered."""
    entered = Path("/run/netns/planish")
    if shutil.which("prometheus") is None or not entered.exists():
        yield None
        return
    folder = tmp_path / "prometheus"
    folder.mkdir()
    kubeconfig = Path(os.environ["KUBECONFIG"])
    address = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    with (
        discovered(lambda: release.get("pods")["items"], folder / "pods.json") as pods,
        prometheus(
            folder,
            in_kubernetes(pods),
            within=("ip", "netns", "exec", entered.name),
            host=str(urlsplit(address).hostname),
        ) as running,
    ):
        yield running


@pytest.fixture
def model(host_folder: Path) -> Path:
    """The quickstart's model, smaller still, where jobs may read models."""
    folder = host_folder / "models" / "tiny"
    folder.mkdir(parents=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    config = build_config(tokenizer) | {"hidden_size": 32, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    for path in [host_folder / "models", folder, *folder.iterdir()]:
        shutil.chown(path, USER, USER)
    return folder


def _rows(path: Path) -> Path:
    draw = random.Random(1)
    with path.open("w") as file:
        for number in (draw.randrange(900) for _ in range(100)):
            question = {"role": "user", "content": f"State the answer: {number} + 1 ="}
            answer = {"role": "assistant", "content": str(number + 1)}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return path


def _sft(model: Path, file: str, name: str, **training: Any) -> dict[str, Any]:
    config = json.loads((model / "config.json").read_text())
    return {
        "name": name,
        "model": {"init": {"config": config, "tokenizer": str(model)}},
        "algorithm": {"type": "sft"},
        "data": {"train": file},
        "parallel": {"tp": 2, "dp": 2},
        "optimizer": {"learning_rate": 1e-3},
        "training": {
            "steps": STEPS,
            "global_batch_size": ROWS_A_STEP,
            "max_length": 64,
            **training,
        },
        "checkpoint": {"every_steps": SAVE_EVERY},
        "resources": {"cluster": "kubernetes", "nodes": 2},
    }


def _leaves_no_pod(release: Release, job: str) -> None:
    selector = f"planish.io/job={job}"
    wait_until(
        lambda: not release.get("pods", "-l", selector)["items"],
        f"no pod of {job} is left",
        120,
        pause=0.2,
    )


def _comes_back(client: Client, job: JobResource) -> None:
    """All that a user asks a service about a job that has ended well."""
    assert job.progress is not None
    steps = job.progress.step
    assert job.progress.total_steps == steps
    assert [row.step for row in client.metrics(job.id)] == list(range(1, steps + 1))
    newest = client.checkpoints(job.id)[-1]
    assert (newest.step, newest.latest) == (steps, True)
    assert client.log(job.id, attempt=1).text
    numbers = [event.id for event in client.events(job.id)]
    assert numbers == list(range(1, len(numbers) + 1))


def _upgrade_while_it_trains(release: Release, job: JobResource) -> None:
    """The control plane's pod is another one afterwards; the job's are the same."""
    selector = f"planish.io/job={job.id}"
    of_job = {each["metadata"]["uid"] for each in release.get("pods", "-l", selector)["items"]}
    pods = release.pods()
    release.upgrade(CHART, "--set", "server.accessLog=true", *WAIT)
    assert not release.pods() & pods
    left = {each["metadata"]["uid"] for each in release.get("pods", "-l", selector)["items"]}
    assert left <= of_job


def _lose_all_in_turn(kube: Kubernetes, client: Client, job: JobResource) -> list[str]:
    """The head's pod without a word, a worker's pod by a wish, and the place in the queue; returns
    the reasons for the attempts' ends."""
    until_checkpoint(client, job)
    kube.lose(*kube.pods(f"{job.id}/1", "head"))
    until_checkpoint(client, job, attempt=2)
    kube.delete(*kube.pods(f"{job.id}/2", "worker"))
    until_checkpoint(client, job, attempt=3)
    kube.set_active(rayjob_name(job.id, 3), False)
    return ["NODE_FAILURE", "PREEMPTED", "PREEMPTED"]


def test_jobs_run_from_the_service_to_their_checkpoints(
    release: Release, model: Path, server: Prometheus | None, tmp_path: Path
) -> None:
    release.install(CHART, *WAIT)
    assert "Phase:          Succeeded" in release.helm("test")
    with release.client() as client:
        file = client.upload(_rows(tmp_path / "rows.jsonl")).id
        calm = client.submit(_sft(model, file, "calm"))
        until_checkpoint(client, calm)
    (workload,) = release.get("workloads.kueue.x-k8s.io")["items"]
    assert workload["spec"]["queueName"] == "planish"
    _upgrade_while_it_trains(release, calm)

    with release.client() as client:
        calm = ended(client, calm)
        _comes_back(client, calm)
        if server is not None:
            assert_scraped(server, client, calm)
        _leaves_no_pod(release, calm.id)

        faulty = client.submit(_sft(model, file, "faulty"))
        reasons = _lose_all_in_turn(Kubernetes(release.namespace), client, faulty)
        faulty = ended(client, faulty)
        assert_as_calm(client, faulty, calm, tmp_path, reasons)
        _leaves_no_pod(release, faulty.id)

        training = {"steps": 2, "global_batch_size": 8, "max_length": 128}
        layout = {"parallel": {"tp": 2}, "resources": {"cluster": "kubernetes"}}
        grpo = client.submit(grpo_job(faulty, name="grpo", training=training, **layout))
        _comes_back(client, ended(client, grpo))
        _leaves_no_pod(release, grpo.id)

        alone = {"parallel": {}, "resources": {"cluster": "kubernetes"}}
        endless = client.submit(_sft(model, file, "endless", steps=100_000) | alone)
        until_checkpoint(client, endless)
        client.cancel(endless.id)
        assert client.wait(endless.id).state.value == "CANCELLED"
        _leaves_no_pod(release, endless.id)

    release.helm("uninstall", "--wait")
    assert release.left_after(120, set()) == set()
