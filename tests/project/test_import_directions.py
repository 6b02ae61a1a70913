"""The direction of knowledge between the packages (docs/architecture.md)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("service", "algorithms", "megatron_backend", "environments")
FORBIDDEN = {
    "service": {"algorithms", "megatron_backend", "environments", "torch", "ray", "megatron"},
    "environments": {"service", "algorithms", "megatron_backend", "torch", "ray", "megatron"},
    "algorithms": {"megatron_backend", "megatron", "ray"},
    "megatron_backend": set(),
}


def imported_modules(file: Path) -> Iterator[str]:
    """Every module that a file imports, at whatever depth the statement stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may_know(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files
        for module in imported_modules(file)
        if module.split(".")[0] in FORBIDDEN[package]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["algorithms", "megatron_backend"])
def test_the_workers_know_of_the_service_only_its_spec(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for module in imported_modules(file)
        if module.split(".")[0] == "service" and module.split(".")[:2] != ["service", "spec"]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("service.spec", ["torch", "ray", "sqlalchemy", "fastapi"]),
        ("environments", ["torch", "ray", "reasoning_gym"]),
        ("algorithms.loop", ["megatron", "ray"]),
    ],
)
def test_importing_loads_nothing_heavy(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"
