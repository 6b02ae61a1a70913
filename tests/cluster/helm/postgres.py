"""A real PostgreSQL on this machine, where pods reach it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

HOST = os.environ.get("PLANISH_TEST_HOST_ADDRESS", "10.199.0.1")
"""Of this machine, as pods see it; the default is that of ../shared/cluster's node."""
PASSWORD = "of-the-tests"


def _programs() -> Path:
    """Where Debian keeps PostgreSQL's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL on this machine")
    if os.geteuid():
        pytest.skip("the test's PostgreSQL runs as the user postgres, which only root can become")
    return found[-1].parent


def _port_at(host: str) -> int:
    try:
        return free_port(host)
    except OSError as error:
        pytest.skip(f"this machine cannot be reached at {host}: {error}")


@contextmanager
def postgres(host: str = HOST) -> Iterator[str]:
    """The URL of an empty database, at an address of this machine."""
    programs, port = _programs(), _port_at(host)
    folder = Path(tempfile.mkdtemp(prefix="planish-postgres-"))
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    data, password = folder / "data", folder / "password"
    password.write_text(PASSWORD)
    for path in (folder, password):
        shutil.chown(path, "postgres", "postgres")

    def run(program: str, *arguments: str) -> None:
        command = [*as_postgres, str(programs / program), "-D", str(data), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120, cwd=folder)

    try:
        run("initdb", "-A", "scram-sha-256", "-U", "planish", f"--pwfile={password}")
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all scram-sha-256\n")
        options = f"-h {host} -p {port} -k {folder} -c fsync=off"
        run("pg_ctl", "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql://planish:{PASSWORD}@{host}:{port}/postgres"
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
