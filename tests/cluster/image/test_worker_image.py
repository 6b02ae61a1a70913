"""The workers' image over a mounted environment, as a strict cluster runs it."""

import sys
import sysconfig

import pytest

from tests.cluster.image.engine import RESTRICTED, Engine, assert_ends_soon

# A build takes minutes on a busy machine.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MOUNTED = (*RESTRICTED, f"--volume={sysconfig.get_path('purelib')}:/opt/packages:ro")
HEAD = (
    "ray start --head --block --num-cpus=1 --include-dashboard=false --disable-usage-stats "
    "--object-store-memory=80000000 --port=6379"
)
WAIT = """
import socket, time
for _ in range(600):
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 6379)) == 0:
            raise SystemExit
    time.sleep(0.2)
raise SystemExit("Ray does not listen")
"""
# A rank's process: Ray's worker, started by Ray itself, with Planish's code.
ASK = """
import ray
ray.init(address="127.0.0.1:6379", log_to_driver=False)

@ray.remote
def rank():
    import os, megatron_backend
    return os.getuid(), megatron_backend.__file__

print(*ray.get(rank.remote(), timeout=120))
"""


def test_the_driver_starts_with_the_image_s_code(engine: Engine, worker_image: str) -> None:
    code = (
        "import sys, torch, megatron_backend.__main__ as driver\n"
        "print(sys.executable, driver.__file__, torch.__file__)"
    )
    python, driver, torch = engine.answer(
        worker_image, "python", "-W", "ignore", "-c", code, options=MOUNTED
    ).split()
    assert python == "/opt/planish/bin/python"
    assert driver.startswith("/opt/planish/lib/")
    assert torch.startswith("/opt/packages/")
    assert "JOB_DIR" in engine.answer(worker_image, options=MOUNTED)


def test_ray_s_head_runs_ranks_and_ends_soon(engine: Engine, worker_image: str) -> None:
    """Ray alone waits three seconds for some of its dozen processes, whatever they do."""
    assert_ends_soon(lambda: _life_of_a_head(engine, worker_image), tries=3)


def _life_of_a_head(engine: Engine, worker_image: str) -> float:
    """How long it takes to end, once it has run a rank under the image's init."""
    options = (*MOUNTED, "--shm-size=512m")
    with engine.container(worker_image, *HEAD.split(), options=options) as head:
        head.run("python", "-c", WAIT)
        uid, code_of_rank = head.run("python", "-W", "ignore", "-c", ASK).stdout.split()
        assert uid == "10001"
        assert code_of_rank.startswith("/opt/planish/lib/")
        assert head.run("id", "-u").stdout.strip() == "10001"
        assert head.run("touch", "/opt/planish/x", check=False).returncode == 1
        return head.seconds_to_end(limit=30)


def test_what_kuberay_s_probes_call_is_there(engine: Engine, worker_image: str) -> None:
    for program in ("wget", "bash", "python3", "ray", "tini"):
        assert engine.answer(worker_image, "which", program, options=RESTRICTED)


def test_process_1_passes_signals_on(engine: Engine, worker_image: str) -> None:
    # Python without a handler, as process 1, would not hear SIGTERM at all.
    code = "import time; time.sleep(600)"

    def life() -> float:
        with engine.container(worker_image, "python", "-c", code, options=RESTRICTED) as container:
            seconds = container.seconds_to_end(limit=30)
            engine.podman("wait", container.name)
            assert container.state("ExitCode") == "143"
            return seconds

    assert_ends_soon(life)


def test_its_python_is_the_mounted_environment_s(engine: Engine, worker_image: str) -> None:
    code = "import sys; print(*sys.version_info[:2])"
    found = engine.answer(worker_image, "python", "-c", code)
    assert found.split() == [str(number) for number in sys.version_info[:2]]
