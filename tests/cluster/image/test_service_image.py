"""The control plane's image, as a strict cluster runs it: no root, no capability, nothing to write
to but /tmp and the volume."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.image.engine import RESTRICTED, Container, Engine, assert_ends_soon
from tests.service.model_folders import write_model
from tests.waiting import wait_until

# A build takes minutes on a busy machine.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

USER = 10001
PORT = 8000
KEY = "planish_" + "k" * 32
ROW = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'
SFT = {
    "name": "sample",
    "model": {"path": "tiny"},
    "algorithm": {"type": "sft"},
    "training": {"max_length": 128, "global_batch_size": 8},
}
GRPO = {
    "name": "online",
    "model": {"path": "tiny"},
    "algorithm": {"type": "grpo", "group_size": 4},
    "environment": {
        "id": "tools/calculator",
        "config": {"questions": {"id": "reasoning_gym/chain_sum"}},
    },
    "rollout": {"max_new_tokens": 16},
    "training": {"max_length": 256, "global_batch_size": 8, "steps": 2},
}


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that only the image's user may enter, with a model and rows."""
    folder = Path(tempfile.mkdtemp(prefix="planish-image-"))
    write_model(folder / "models" / "tiny")
    (folder / "rows.jsonl").write_text(ROW)
    (folder / "sft.json").write_text(json.dumps(SFT))
    (folder / "grpo.json").write_text(json.dumps(GRPO))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def serving(engine: Engine, service_image: str, volume: Path) -> Iterator[Container]:
    """The image's own command, healthy."""
    variables = {
        "PLANISH_BOOTSTRAP_KEY": KEY,
        # For the commands that tests run beside it.
        "PLANISH_URL": f"http://127.0.0.1:{PORT}",
        "PLANISH_API_KEY": KEY,
    }
    given = (f"--env={name}={value}" for name, value in variables.items())
    options = (*RESTRICTED, f"--volume={volume}:/data", *given)
    with engine.container(service_image, options=options) as container:
        container.wait_until_healthy()
        yield container


@pytest.fixture
def service(engine: Engine, service_image: str, volume: Path) -> Iterator[Container]:
    with serving(engine, service_image, volume) as container:
        yield container


def planish(service: Container, *arguments: str) -> str:
    """What a command prints to the service beside it."""
    return service.run("planish", *arguments).stdout


def wait_until_ready(service: Container) -> None:
    """Ready: the environments are listed too."""
    code = (
        "import time, urllib.error, urllib.request\n"
        "for _ in range(600):\n"
        "    try:\n"
        f"        urllib.request.urlopen('http://127.0.0.1:{PORT}/readyz'); break\n"
        "    except urllib.error.HTTPError as error:\n"
        "        last = error.read().decode(); time.sleep(0.2)\n"
        "else:\n"
        "    raise SystemExit(last)\n"
    )
    service.run("python", "-c", code)


def connections(service: Container) -> int:
    """How many clients the service has now."""
    lines = Path(f"/proc/{service.state('Pid')}/net/tcp").read_text().splitlines()[1:]
    sockets = [line.split() for line in lines]
    established = "01"
    return sum(
        local.endswith(f":{PORT:04X}") and state == established
        for _, local, _, state, *_ in sockets
    )


def test_its_process_has_no_rights(service: Container) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in service.run("cat", "/proc/1/status").stdout.splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == [str(USER)] * 4
    assert status["Gid"].split() == [str(USER)] * 4
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0
    refused = service.run("touch", "/opt/planish/x", check=False)
    assert refused.returncode == 1
    assert "Read-only file system" in refused.stderr


def test_jobs_are_planned_and_taken(service: Container, volume: Path) -> None:
    wait_until_ready(service)
    file = planish(service, "files", "upload", "/data/rows.jsonl").strip()
    path = volume / "sft.json"
    path.write_text(json.dumps({**SFT, "data": {"train": file}}))
    assert json.loads(planish(service, "plan", "/data/sft.json", "--json"))["layout"]
    # An environment is asked in a process of its own, with the libraries that it needs.
    assert json.loads(planish(service, "plan", "/data/grpo.json", "--json"))["layout"]
    job = planish(service, "submit", "/data/sft.json").strip()
    assert [one["id"] for one in json.loads(planish(service, "list", "--json"))] == [job]


def test_it_ends_soon_though_somebody_watches(
    engine: Engine, service_image: str, volume: Path
) -> None:
    def life() -> float:
        with serving(engine, service_image, volume) as service:
            wait_until_ready(service)
            job = planish(service, "submit", "/data/grpo.json").strip()
            watching = subprocess.Popen(
                ["podman", "exec", service.name, "planish", "logs", "--follow", job],
                env=engine.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                wait_until(lambda: connections(service) > 0, "somebody watches", 60)
                seconds = service.seconds_to_end(limit=30)
                engine.podman("wait", service.name)
                assert service.state("ExitCode") == "0"
                watching.wait(timeout=60)
            finally:
                watching.kill()
                watching.wait()
            return seconds

    assert_ends_soon(life)


def test_a_container_that_does_not_serve_is_not_healthy(engine: Engine, service_image: str) -> None:
    options = (*RESTRICTED, "--entrypoint=sleep")
    with engine.container(service_image, "600", options=options) as container:
        found = engine.podman("healthcheck", "run", container.name, check=False)
        assert found.returncode == 1


def test_without_a_volume_it_says_what_is_missing(engine: Engine, service_image: str) -> None:
    options = (*RESTRICTED, "--image-volume=ignore")
    with engine.container(service_image, options=options) as container:
        engine.podman("wait", container.name)
        assert "the data folder /data cannot be used: Read-only file system" in container.logs()
        assert container.state("ExitCode") == "2"


def test_every_kind_of_cluster_and_database_can_be_used(engine: Engine, service_image: str) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "from sqlalchemy import create_engine\n"
        "create_engine('postgresql+psycopg://user@localhost/planish').dialect\n"
        "print(*sorted(e.name for e in entry_points(group='planish.launchers') if e.load()))\n"
    )
    names = engine.answer(service_image, "-c", code, options=(*RESTRICTED, "--entrypoint=python"))
    assert names.split() == ["kuberay", "local", "ray_jobs", "slurm"]


def test_it_holds_no_torch_and_no_ray(engine: Engine, service_image: str) -> None:
    code = (
        "from importlib.util import find_spec as f\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'pip', 'setuptools') if f(name)])"
    )
    options = (*RESTRICTED, "--entrypoint=python")
    assert engine.answer(service_image, "-c", code, options=options).strip() == "[]"
