"""The images' lock files: of the project's lock, what each image needs, and nothing of an index."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
# Where a package is not called as its module is.
DISTRIBUTIONS = {"opentelemetry": "opentelemetry-sdk", "yaml": "pyyaml"}
LOADERS = ("import_module", "find_spec")
LOCKS = ("build", "service", "worker")


def pins(lock: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Version and hashes of each package of a lock file."""
    found = {}
    for block in re.split(r"\n(?=\S)", lock.read_text()):
        pinned = re.match(r"([a-z0-9-]+)==([^ ;\\]+)", block)
        if pinned:
            hashes = frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", block))
            found[pinned[1]] = (pinned[2], hashes)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_an_image_s_lock_agrees_with_the_project_s(name: str) -> None:
    lock = DOCKER / f"{name}.lock"
    assert not re.search(r"https?://|--index-url|--find-links", lock.read_text())
    project, image = pins(ROOT / "requirements.lock"), pins(lock)
    assert image
    assert all(hashes for _, hashes in image.values())
    others = {package for package in image if image[package] != project.get(package)}
    assert others == set(), "run deploy/docker/lock.sh"


def test_the_service_s_lock_has_what_its_code_imports_and_nothing_heavy() -> None:
    locked = set(pins(DOCKER / "service.lock"))
    imported = {
        module.partition(".")[0]
        for package in ("service", "environments")
        for file in (ROOT / package).rglob("*.py")
        for module in _imports(file)
    } - {*sys.stdlib_module_names, "service", "environments"}
    assert {"fastapi", "reasoning_gym"} <= imported
    missing = {
        DISTRIBUTIONS.get(module) or canonicalize_name(module) for module in imported
    } - locked
    assert missing == set(), "name them in deploy/docker/service.in"
    heavy = {"torch", "ray", "megatron-core", "transformers", "triton", "tokenizers"}
    assert not [one for one in locked if one in heavy or one.startswith(("nvidia-", "cuda-"))]


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOADERS:
            yield from (str(one.value) for one in node.args if isinstance(one, ast.Constant))


def test_the_worker_s_lock_has_all_but_what_comes_with_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["s3"]]
    locked = set(pins(DOCKER / "worker.lock"))
    assert {canonicalize_name(Requirement(one).name) for one in asked} - locked == {"torch"}
    assert not [one for one in locked if re.match(r"torch$|triton$|nvidia-|cuda-", one)]
