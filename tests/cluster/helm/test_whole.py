"""The whole thing in Kubernetes, as a user has it.

The control plane's image is installed by helm. A job sent to its Service becomes a RayJob by the
chart's Role alone, is admitted by Kueue, and trains in pods of its own; then another goes on from
it with GRPO. The control plane is upgraded while the first trains.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from quickstart.model import build_config, build_tokenizer
from tests.cluster.helm import workers
from tests.cluster.helm.conftest import CHART, USER, Programs
from tests.cluster.helm.release import WAIT, Release, upload
from tests.cluster.sites.kuberay import skip_unless_there

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

SECONDS = 420
STEPS, ROWS_A_STEP = 60, 10
OVER = {"SUCCEEDED", "FAILED", "CANCELLED"}


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
        "clusters": {"kubernetes": workers.options(host_folder.parent, kubeconfig)},
        # This machine has fewer cores than the jobs ask for; Kueue does not know.
        "kueue": {"create": True, "quota": {"cpu": "64", "memory": "256Gi"}},
    }


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


def _rows() -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [
        {
            "messages": [
                {"role": "user", "content": f"State the answer: {number} + 1 ="},
                {"role": "assistant", "content": str(number + 1)},
            ]
        }
        for number in (draw.randrange(900) for _ in range(100))
    ]


def _sft(model: Path, file: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "helm-sft",
        "model": {
            "init": {
                "config": json.loads((model / "config.json").read_text()),
                "tokenizer": str(model),
            }
        },
        "algorithm": {"type": "sft"},
        "data": {"train": file},
        "parallel": {"tp": 2},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
        "checkpoint": {"every_steps": 10, "export": False},
        "resources": {"cluster": "kubernetes"},
        **changes,
    }


def _grpo(before: str) -> dict[str, Any]:
    questions = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return {
        "name": "helm-grpo",
        "model": {"from": f"job:{before}@latest"},
        "algorithm": {"type": "grpo", "group_size": 2},
        "environment": {"id": "reasoning_gym/chain_sum", "config": questions},
        "parallel": {"tp": 2},
        "rollout": {"max_new_tokens": 4},
        "training": {"steps": 2, "global_batch_size": 8, "max_length": 128},
        "resources": {"cluster": "kubernetes"},
    }


def _submit(api: httpx.Client, document: Mapping[str, Any]) -> str:
    answer = api.post("/v1/jobs", json=document)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _wait(
    api: httpx.Client, job: str, what: str, holds: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        found: Mapping[str, Any] = api.get(f"/v1/jobs/{job}").json()
        if holds(found):
            return found
        assert found["state"] not in OVER, f"{job} did not get as far as {what}: {found}"
        assert time.monotonic() < deadline, f"not within {SECONDS} s: {what} of {job}: {found}"
        time.sleep(0.5)


def _step(job: Mapping[str, Any]) -> int:
    return int((job["progress"] or {"step": 0})["step"])


def _listed(api: httpx.Client, path: str) -> list[dict[str, Any]]:
    """All of a listing, page by page."""
    found: list[dict[str, Any]] = []
    after: dict[str, Any] = {}
    while True:
        page = api.get(path, params={"limit": 100, **after}).json()
        found += page["data"]
        if not page["has_more"]:
            return found
        after = {"after": page["last_id"]}


def _ends_well(release: Release, api: httpx.Client, job: str, steps: int) -> None:
    """Nothing that the job said on its way is missing, or there twice."""
    ended = _wait(api, job, "SUCCEEDED", lambda found: found["state"] == "SUCCEEDED")
    assert [attempt["reason"] for attempt in ended["attempts"]] == [None]
    rows = _listed(api, f"/v1/jobs/{job}/metrics")
    assert sorted(row["step"] for row in rows) == list(range(1, steps + 1))
    checkpoints = _listed(api, f"/v1/jobs/{job}/checkpoints")
    assert any(each["step"] == steps and each["latest"] for each in checkpoints)
    assert api.get(f"/v1/jobs/{job}/logs", params={"attempt": 1}).text
    _leaves_no_pod(release, job)


def _leaves_no_pod(release: Release, job: str) -> None:
    deadline = time.monotonic() + SECONDS
    selector = f"planish.io/job={job}"
    while release.get("pods", "-l", selector)["items"]:
        assert time.monotonic() < deadline, f"pods of {job} are left"
        time.sleep(1)


def test_jobs_run_from_the_service_to_their_checkpoints(release: Release, model: Path) -> None:
    release.install(CHART, *WAIT)
    assert "Phase:          Succeeded" in release.helm("test")
    with release.api() as api:
        file = upload(api, _rows())
        sft = _submit(api, _sft(model, file))
        _wait(api, sft, "some steps", lambda found: _step(found) >= 2)
    (workload,) = release.get("workloads.kueue.x-k8s.io")["items"]
    assert workload["spec"]["queueName"] == "planish"

    # The control plane is replaced while the job trains.
    pods = release.pods()
    release.upgrade(CHART, "--set", "server.accessLog=true", *WAIT)
    assert not release.pods() & pods

    with release.api() as api:
        _ends_well(release, api, sft, STEPS)
        grpo = _submit(api, _grpo(sft))
        _ends_well(release, api, grpo, 2)

        endless = _submit(api, _sft(model, file, training={"steps": 100_000, "max_length": 64}))
        _wait(api, endless, "a step", lambda found: _step(found) >= 1)
        assert api.post(f"/v1/jobs/{endless}/cancel").status_code == 202
        _wait(api, endless, "CANCELLED", lambda found: found["state"] == "CANCELLED")
        _leaves_no_pod(release, endless)

    release.helm("uninstall", "--wait")
    assert release.left_after(120, set()) == set()
