"""The command that Ray runs, run by the shell that Ray would use."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from service.launchers import LaunchRequest
from service.launchers.ray_jobs.entrypoint import EXIT_NO_FOLDER, EXIT_TAKEN, entrypoint, submission
from tests.waiting import wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]

SAY = """#!/bin/sh
printf '%s\\n' "$@" > {out}
setsid sleep {seconds} &
exec sleep {seconds}
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an attempt's command as Ray does: through a shell, as the leader of a session."""
    started: list[subprocess.Popen[bytes]] = []

    def run(request: LaunchRequest, *, seconds: float = 0) -> "subprocess.Popen[bytes]":
        python = tmp_path / "a 'python' $(touch pwned)"
        python.write_text(SAY.format(out=tmp_path / "arguments", seconds=seconds))
        python.chmod(0o755)
        process = subprocess.Popen(
            entrypoint(request, name(request), python=str(python)),
            shell=True,
            start_new_session=True,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def attempt_folder(request: LaunchRequest) -> Path:
    folder = request.job_dir / "attempts/1"
    folder.mkdir(parents=True)
    return folder


def with_folder(request: LaunchRequest, job_dir: Path) -> LaunchRequest:
    return LaunchRequest(job_id=request.job_id, attempt=1, job_dir=job_dir, context=request.context)


@pytest.mark.parametrize("name", ["jobs", "a b", "$(touch pwned)", "it's; touch pwned #"])
def test_g07_the_driver_gets_its_arguments_whatever_the_folder_is_called(
    tmp_path: Path, new_request: Callable[[], LaunchRequest], start: Start, name: str
) -> None:
    request = new_request()
    request = with_folder(request, tmp_path / name / request.job_id)
    request.job_dir.mkdir(parents=True, exist_ok=True)
    assert start(request).wait(30) == 0
    assert (tmp_path / "arguments").read_text().splitlines() == [
        *("-m", "megatron_backend", str(request.job_dir), "--attempt", "1", "--log")
    ]
    assert os.readlink(request.job_dir / "attempts/1/taken") == "driver"
    assert not list(tmp_path.rglob("pwned"))


def test_who_comes_second_does_nothing(
    tmp_path: Path, new_request: Callable[[], LaunchRequest], start: Start
) -> None:
    request = new_request()
    os.symlink("nobody", attempt_folder(request) / "taken")
    assert start(request).wait(30) == EXIT_TAKEN
    assert not (tmp_path / "arguments").exists()


def test_a_machine_that_does_not_see_the_folder_is_told_apart(
    tmp_path: Path, new_request: Callable[[], LaunchRequest], start: Start
) -> None:
    request = with_folder(new_request(), tmp_path / "not mounted" / "job")
    assert start(request).wait(30) == EXIT_NO_FOLDER


@pytest.mark.parametrize("by", ["service", "itself"])
def test_nothing_of_a_driver_outlives_it(
    new_request: Callable[[], LaunchRequest], start: Start, by: str
) -> None:
    request = new_request()
    folder = attempt_folder(request)
    driver = start(request, seconds=600)
    wait_until(lambda: len(marked(request)) >= 2, "the driver's child lives", 30)
    if by == "service":
        (folder / "kill").touch()
    else:
        driver.terminate()
    assert driver.wait(30) == (-9 if by == "service" else -15)
    wait_until(
        lambda: not (marked(request) or members(driver.pid)),
        "the driver's children and the watch are gone",
        30,
    )


def name(request: LaunchRequest) -> str:
    return f"planish-{request.job_id}-1"


def marked(request: LaunchRequest) -> list[str]:
    """The processes that came out of the driver."""
    mark, found = f"PLANISH_DRIVER={name(request)}".encode(), []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                found.append(environ.parent.name)
    return found


def members(group: int) -> list[str]:
    listed = subprocess.run(["ps", "-o", "pgid=", "-A"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.split() if line == str(group)]


def test_the_request_has_the_operators_variables_and_the_attempts_marks(
    new_request: Callable[[], LaunchRequest],
) -> None:
    request = new_request()
    body: dict[str, Any] = submission(
        request,
        "planish-x-1",
        python="python3",
        env={"HF_HOME": "$(touch pwned)", "PLANISH_ATTEMPT": "7"},
        data_roots=[Path("/data"), Path("/more")],
        driver_resources={"slot": 0.5},
    )
    assert body["submission_id"] == "planish-x-1"
    assert body["runtime_env"]["env_vars"] == {
        "HF_HOME": "$(touch pwned)",
        "PLANISH_JOB_ID": request.job_id,
        "PLANISH_ATTEMPT": "1",
        "PLANISH_DATA_ROOTS": "/data:/more",
        "RAY_JOB_STOP_WAIT_TIME_S": "135",
    }
    assert body["entrypoint_resources"] == {"slot": 0.5}
    assert body["entrypoint"].strip()
    assert json.loads(json.dumps(body)) == body
