"""What is built is what is meant to be built: the four packages, and nothing else."""

import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"service", "algorithms", "megatron_backend", "environments"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from what git would commit, by the project's own build backend."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("planish-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site folder of an environment into which pip installed the wheel and nothing else."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([environment / "bin" / "python", *install], check=True)
    return next(environment.glob("lib/python*/site-packages"))


def test_it_holds_exactly_the_four_packages(installed: Path) -> None:
    (info,) = installed.glob("planish-*.dist-info")
    files = [row.split(",")[0] for row in (info / "RECORD").read_text().splitlines()]
    folders = {Path(file).parts[0] for file in files} - {info.name, ".."}  # .. is bin/planish
    assert folders == PACKAGES


def test_it_holds_every_module_and_the_type_marks(installed: Path) -> None:
    for package in PACKAGES:
        wanted = {
            str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py") if p.is_file()
        } | {f"{package}/py.typed"}
        held = {str(p.relative_to(installed)) for p in (installed / package).rglob("*.*")}
        assert wanted <= held, wanted - held


def test_the_packages_of_the_wheel_import_alone(installed: Path) -> None:
    code = "import service.spec, service.app, environments; print(service.spec.__file__)"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=installed,
        env={"PYTHONPATH": str(installed), "PATH": ""},
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith(str(installed))


def test_its_metadata_names_licence_and_script(installed: Path) -> None:
    (info,) = installed.glob("planish-*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "planish = service.cli:main" in (info / "entry_points.txt").read_text()
