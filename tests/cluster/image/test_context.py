"""What a build is given: source, and nothing that lies beside it in somebody's checkout."""

import subprocess
from pathlib import Path

import pytest

from tests.cluster.image.engine import ROOT, Engine

# A build takes minutes on a busy machine.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PACKAGES = ("algorithms", "environments", "megatron_backend", "service")
OTHERS = {
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "deploy/docker/build.lock",
    "deploy/docker/check_worker.py",
    "deploy/docker/healthcheck.py",
    "deploy/docker/service.lock",
    "deploy/docker/worker.lock",
}
DECOYS = (
    ".env",
    ".git/config",
    ".venv/lib/python3.12/site-packages/torch/__init__.py",
    ".mypy_cache/3.12/service.json",
    "id_rsa",
    "planish.db",
    "planish.egg-info/PKG-INFO",
    "quickstart/out/model.safetensors",
    "service/.env",
    "service/production.env",
    "service/api/.cache/key",
    "service/api/tls.key",
    "service/ca.pem",
    "service/__pycache__/app.cpython-312.pyc",
    "service/planish.egg-info/PKG-INFO",
    "deploy/docker/.secret",
    "deploy/docker/pip.conf",
    "deploy/kubeconfig",
    "tests/data/rows.jsonl",
)


@pytest.fixture
def checkout(tmp_path: Path) -> tuple[Path, set[str]]:
    """A copy of what git has, and its paths."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    tracked = {name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()}
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path, tracked


def test_it_is_the_packages_and_what_installs_them(
    engine: Engine, checkout: tuple[Path, set[str]]
) -> None:
    folder, tracked = checkout
    for decoy in DECOYS:
        assert decoy not in tracked
        (folder / decoy).parent.mkdir(parents=True, exist_ok=True)
        (folder / decoy).write_text("not for images")
    wanted = {name for name in tracked if name.split("/")[0] in PACKAGES and "/" in name}
    assert engine.context_of(folder) == wanted | OTHERS
