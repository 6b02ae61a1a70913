"""Isolated calls: a deadline that holds, a death that is told, and nothing that leaks."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments.isolation import (
    CallFailed,
    CallTimeout,
    Isolation,
    IsolationError,
    WorkerDied,
)
from tests.waiting import wait_until

FUNCTIONS = """
import os, time

def double(x):
    return 2 * x

def power(x):
    return len(str(x ** x ** x ** x))

def swallow(x):
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def die(x):
    os.kill(os.getpid(), 11)

def greedy(x):
    return len(bytearray(x))

def fail(x):
    raise LookupError(f"no {x}")

def environment(x):
    return dict(os.environ)

def write(path):
    with open(path, "w") as file:
        file.write("x")

def chatter(x):
    print("noise")
    return hash("a text")
"""


@pytest.fixture(scope="module")
def isolation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Isolation]:
    folder = tmp_path_factory.mktemp("isolated")
    (folder / "isolated_functions.py").write_text(FUNCTIONS)
    sys.path.append(str(folder))
    isolation = Isolation("isolated_functions")
    yield isolation
    isolation.close()
    sys.path.remove(str(folder))


def test_the_result_comes_back(isolation: Isolation) -> None:
    assert isolation.call("double", 21, timeout_seconds=10) == 42
    assert isolation.call("double", "é", timeout_seconds=10) == "éé"


@pytest.mark.parametrize("function", ["power", "swallow"])
def test_c03_a_call_that_hangs_ends_at_its_deadline(isolation: Isolation, function: str) -> None:
    started = time.monotonic()
    with pytest.raises(CallTimeout, match=r"no result after 0\.5 s"):
        isolation.call(function, 99, timeout_seconds=0.5)
    assert time.monotonic() - started < 3.0
    assert isolation.call("double", 1, timeout_seconds=10) == 2


@pytest.mark.asyncio
async def test_c03_sixty_four_that_hang_delay_nobody(isolation: Isolation) -> None:
    async def hang() -> float:
        started = time.monotonic()
        with pytest.raises(CallTimeout):
            await isolation.call_async("power", 99, timeout_seconds=2)
        return time.monotonic() - started

    # Two seconds are the deadline; a machine that has other work as well may need some more.
    assert max(await asyncio.gather(*(hang() for _ in range(64)))) < 6.0
    assert await isolation.call_async("double", 1, timeout_seconds=10) == 2


def test_a_death_is_told_from_a_deadline(isolation: Isolation) -> None:
    with pytest.raises(WorkerDied):
        isolation.call("die", 1, timeout_seconds=10)
    with pytest.raises(CallFailed, match="MemoryError"):
        isolation.call("greedy", 1 << 40, timeout_seconds=10)
    assert isolation.call("double", 1, timeout_seconds=10) == 2


def test_an_exception_is_told_by_name(isolation: Isolation) -> None:
    with pytest.raises(CallFailed, match="LookupError: no luck"):
        isolation.call("fail", "luck", timeout_seconds=10)


def test_no_secret_of_ours_is_seen(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret123")
    isolation.close()
    seen = isolation.call("environment", None, timeout_seconds=10)
    assert "hf_secret123" not in str(seen)
    assert set(seen) <= {
        "PATH",
        "LC_ALL",
        "LC_CTYPE",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
    }


def test_no_file_can_be_written(isolation: Isolation, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(IsolationError):
        isolation.call("write", str(path), timeout_seconds=10)
    assert not path.exists() or path.stat().st_size == 0


def test_hashes_are_the_same_in_every_process(
    isolation: Isolation, capfd: pytest.CaptureFixture[str]
) -> None:
    first = isolation.call("chatter", None, timeout_seconds=10)
    isolation.close()
    assert isolation.call("chatter", None, timeout_seconds=10) == first
    assert "noise" not in "".join(capfd.readouterr())


def test_what_is_not_json_is_refused(isolation: Isolation) -> None:
    with pytest.raises(TypeError):
        isolation.call("double", {1, 2}, timeout_seconds=10)
    assert isolation.call("double", 1, timeout_seconds=10) == 2


def test_a_module_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    isolation = Isolation("no_such_module")
    with pytest.raises(WorkerDied, match="no_such_module"):
        isolation.call("double", 1, timeout_seconds=10)
    isolation.close()
    assert "ModuleNotFoundError" in capfd.readouterr().err


def test_the_forking_process_is_started_again(isolation: Isolation) -> None:
    isolation.call("double", 1, timeout_seconds=10)
    assert isolation._server is not None
    isolation._server.kill()
    isolation._server.wait()
    assert isolation.call("double", 1, timeout_seconds=10) == 2


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    (tmp_path / "isolated_functions.py").write_text(FUNCTIONS)
    owner = tmp_path / "owner.py"
    owner.write_text(
        textwrap.dedent("""
            import sys, time
            from environments.isolation import isolated
            isolation = isolated("isolated_functions")
            isolation.call("double", 1, timeout_seconds=10)
            sys.stdout.write(f"{isolation._server.pid}\\n")
            sys.stdout.flush()
            time.sleep(60)
        """)
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    with subprocess.Popen(
        [sys.executable, str(owner)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    ) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        os.kill(server, 0)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: has_ended(server), "the server has ended", 10)


def has_ended(pid: int) -> bool:
    """A zombie has ended; nobody may be there to wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_fork_has_processes_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "isolated_functions.py").write_text(FUNCTIONS)
    program = """
import os
from environments.isolation import isolated
ours = isolated("isolated_functions")
assert ours.call("double", 1, timeout_seconds=10) == 2
child = os.fork()
theirs = isolated("isolated_functions")
assert theirs.call("double", 2, timeout_seconds=10) == 4
assert (theirs is ours) == (child != 0)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ours.call("double", 3, timeout_seconds=10) == 6
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
