"""The small programs of the images: the health check, the check of a base, the build script."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"


@pytest.fixture
def answering() -> Iterator[HTTPServer]:
    """A server that answers /healthz with the status that it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/healthz"
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _health(port: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(DOCKER / "healthcheck.py")],
        env={"PLANISH_HEALTH_PORT": str(port)},
        capture_output=True,
        text=True,
    )


def test_the_health_check_passes_only_where_the_service_is_well(answering: HTTPServer) -> None:
    answering.status = 200  # type: ignore[attr-defined]
    assert _health(answering.server_port).returncode == 0
    answering.status = 503  # type: ignore[attr-defined]
    sick = _health(answering.server_port)
    assert (sick.returncode, sick.stderr) == (1, "/healthz answers 503\n")


def test_the_health_check_fails_where_nobody_listens(unused_port: int) -> None:
    silent = _health(unused_port)
    assert silent.returncode == 1
    assert silent.stderr.startswith(f"no answer on port {unused_port}: ")


@pytest.fixture
def unused_port() -> int:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return server.server_port


def test_a_base_that_planish_cannot_use_stops_the_build() -> None:
    # Here torch is the right one, and Transformer Engine is missing.
    done = subprocess.run(
        [sys.executable, str(DOCKER / "check_worker.py")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stderr == "worker image: the base image has no Transformer Engine\n"


def test_a_base_with_another_torch_is_named(tmp_path: Path) -> None:
    info = tmp_path / "torch-2.9.0a0+nv.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0a0+nv\n")
    done = subprocess.run(
        [sys.executable, str(DOCKER / "check_worker.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "the base image has 2.9.0a0+nv" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["planish"], ["service", "a", "b"]])
def test_the_build_script_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    done = subprocess.run([str(DOCKER / "build.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "build.sh service|worker [TAG]" in done.stderr


def test_the_build_script_names_the_builders_that_it_knows() -> None:
    done = subprocess.run(
        [str(DOCKER / "build.sh"), "service"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "BUILDER": "kaniko"},
    )
    assert (done.returncode, done.stderr) == (
        2,
        "BUILDER must be docker, podman or buildah; it is kaniko\n",
    )
