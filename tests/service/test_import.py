"""The service is light: nothing heavy at import, nothing done by it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "megatron", "megatron_backend", "algorithms", "environments")


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["service.app", "service.cli.main", "service.cli.server"])
def test_nothing_heavy_is_imported(module: str) -> None:
    assert not loaded_by(f"import {module}") & set(HEAVY)


def test_the_command_line_does_not_load_the_server() -> None:
    loaded = loaded_by("import service.cli.main")
    assert not loaded & {"fastapi", "uvicorn", "sqlalchemy", "alembic"}


@pytest.mark.parametrize(("module", "seconds"), [("service", 0.5), ("service.spec", 1.0)])
def test_the_contract_is_quick_to_import(module: str, seconds: float) -> None:
    """In CPU time, the best of three, so that a busy machine does not decide."""
    code = (
        f"import time; start = time.process_time(); import {module}; "
        "print(time.process_time() - start)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert min(times) < seconds
