import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.launchers import LaunchError, LauncherUnavailable, LaunchRequest, Observation, Phase
from service.launchers.local import LocalLauncher
from tests.waiting import wait_until

DRIVER = Path(__file__).with_name("driver.py")
SECONDS = 30.0

NewRequest = Callable[[], LaunchRequest]


def launcher(jobs_dir: Path, *behaviours: str) -> LocalLauncher:
    return LocalLauncher(jobs_dir, command=[sys.executable, "-I", "-S", str(DRIVER), *behaviours])


def launch(local: LocalLauncher, request: LaunchRequest) -> str:
    local.submit(request)
    return local.identify(request.job_id, request.attempt)


def wait_until_exited(local: LocalLauncher, launcher_id: str) -> Observation:
    def exited() -> Observation | None:
        seen = local.poll(launcher_id)
        return seen if seen.phase is Phase.EXITED else None

    return wait_until(exited, "the driver ends", SECONDS)


def starts(request: LaunchRequest) -> list[str]:
    path = request.job_dir / "starts"
    return path.read_text().split() if path.exists() else []


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(request: LaunchRequest) -> list[int]:
    path = request.job_dir / "children"
    wait_until(path.exists, "the driver has children", SECONDS)
    return [int(pid) for pid in path.read_text().split()]


def test_a_driver_is_started_seen_and_its_exit_known(
    jobs_dir: Path, new_request: NewRequest
) -> None:
    request = new_request()
    local = launcher(jobs_dir, "wait", "exit=3")
    assert local.poll(local.identify(request.job_id, 1)).phase is Phase.UNKNOWN
    name = launch(local, request)
    assert local.poll(name).phase is Phase.RUNNING
    (request.job_dir / "go").touch()
    seen = wait_until_exited(local, name)
    assert (seen.exit_code, seen.exit_signal, seen.leftovers) == (3, None, 0)
    assert (request.job_dir / "attempts/1/log").read_text() == "last words\n"
    assert starts(request) == ["1"]


def test_the_signal_that_ended_a_driver_is_known(jobs_dir: Path, new_request: NewRequest) -> None:
    local = launcher(jobs_dir, "die")
    seen = wait_until_exited(local, launch(local, new_request()))
    assert (seen.exit_code, seen.exit_signal) == (None, signal.SIGKILL)


def test_g15_a_second_submit_finds_the_first(jobs_dir: Path, new_request: NewRequest) -> None:
    request = new_request()
    local = launcher(jobs_dir, "wait")
    launch(local, request)
    local.submit(request)
    name = launch(launcher(jobs_dir, "wait"), request)
    (request.job_dir / "go").touch()
    wait_until_exited(local, name)
    local.submit(request)
    assert starts(request) == ["1"]


def test_submits_at_the_same_instant_start_one_driver(
    jobs_dir: Path, new_request: NewRequest
) -> None:
    request = new_request()
    services = [launcher(jobs_dir, "wait") for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        names = list(threads.map(lambda local: launch(local, request), services))
    assert len(set(names)) == 1
    assert all(local.poll(names[0]).phase is Phase.RUNNING for local in services)
    (request.job_dir / "go").touch()
    for local in services:
        wait_until_exited(local, names[0])
    assert starts(request) == ["1"]


def test_a_new_service_process_finds_the_driver_again(
    jobs_dir: Path, new_request: NewRequest
) -> None:
    request = new_request()
    name = launch(launcher(jobs_dir, "wait"), request)
    restarted = launcher(jobs_dir)
    assert restarted.poll(name).phase is Phase.RUNNING
    (request.job_dir / "go").touch()
    seen = wait_until_exited(restarted, name)
    assert (seen.exit_code, seen.exit_signal, seen.leftovers) == (None, None, 0)


def test_a_command_that_is_not_there_is_told(jobs_dir: Path, new_request: NewRequest) -> None:
    request = new_request()
    local = LocalLauncher(jobs_dir, command=["/nowhere/driver"])
    with pytest.raises(LaunchError, match=r"/nowhere/driver: .*No such file"):
        local.submit(request)
    name = local.identify(request.job_id, 1)
    assert wait_until_exited(local, name).exit_code == 127


def test_a_folder_that_cannot_be_written_is_told(jobs_dir: Path, new_request: NewRequest) -> None:
    request = new_request()
    local = launcher(jobs_dir)
    (request.job_dir / "attempts/1/log").mkdir(parents=True)
    with pytest.raises(LaunchError, match="Is a directory"):
        local.submit(request)
    assert starts(request) == []


def test_the_driver_leads_its_own_group_with_marks_and_no_secret(
    jobs_dir: Path, new_request: NewRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANISH_BOOTSTRAP_KEY", "planish_secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    request = new_request()
    local = launcher(jobs_dir, "print-environment", "wait")
    name = launch(local, request)
    pid = json.loads((request.job_dir / "attempts/1/process.json").read_text())["pid"]
    assert os.getpgid(pid) == os.getsid(pid) == pid
    (request.job_dir / "go").touch()
    wait_until_exited(local, name)
    log = (request.job_dir / "attempts/1/log").read_text()
    seen = json.loads(log)
    assert (seen["PLANISH_JOB_ID"], seen["PLANISH_ATTEMPT"]) == (request.job_id, "1")
    assert "secret" not in log


def test_g31_cancel_ends_all_of_one_job_and_nothing_of_its_neighbour(
    jobs_dir: Path, new_request: NewRequest
) -> None:
    mine, neighbour = new_request(), new_request()
    local = launcher(jobs_dir, "children", "wait")
    names = [launch(local, request) for request in (mine, neighbour)]
    gone, kept = children(mine), children(neighbour)
    local.cancel(names[0], 30.0)
    seen = wait_until_exited(local, names[0])
    assert seen.exit_signal == signal.SIGTERM
    local.cancel(names[0], 0.0)
    wait_until(lambda: local.poll(names[0]).leftovers == 0, "nothing is left", SECONDS)
    wait_until(
        lambda: not any(lives(pid) for pid in gone),
        "the children of the cancelled job are gone",
        SECONDS,
    )
    assert local.poll(names[1]).phase is Phase.RUNNING
    assert all(lives(pid) for pid in kept)
    local.cancel(names[1], 0.0)
    wait_until_exited(local, names[1])


def test_a_driver_that_ignores_the_request_is_killed_after_the_grace(
    jobs_dir: Path, new_request: NewRequest
) -> None:
    request = new_request()
    local = launcher(jobs_dir, "ignore-term", "children", "wait")
    name = launch(local, request)
    pids = children(request)
    local.cancel(name, 5.0)
    local.cancel(name, 5.0)
    time.sleep(0.05)
    assert local.poll(name).phase is Phase.RUNNING
    local.cancel(name, 0.0)
    assert wait_until_exited(local, name).exit_signal == signal.SIGKILL
    wait_until(lambda: local.poll(name).leftovers == 0, "nothing is left", SECONDS)
    wait_until(lambda: not any(lives(pid) for pid in pids), "the children are gone", SECONDS)


def test_what_a_dead_driver_left_behind_is_found_after_a_restart(
    jobs_dir: Path, new_request: NewRequest
) -> None:
    request = new_request()
    name = launch(launcher(jobs_dir, "children", "wait"), request)
    children(request)
    (request.job_dir / "go").touch()
    restarted = launcher(jobs_dir)
    # The two that kept their marks; the third hid itself from all but its living parent.
    assert wait_until_exited(restarted, name).leftovers == 2
    restarted.cancel(name, 0.0)
    wait_until(lambda: restarted.poll(name).leftovers == 0, "nothing is left", SECONDS)


def test_an_attempt_that_was_shut_out_never_starts(jobs_dir: Path, new_request: NewRequest) -> None:
    request = new_request()
    local = launcher(jobs_dir, "succeed")
    name = local.identify(request.job_id, 1)
    local.cancel(name, 0.0)
    local.cancel(name, 0.0)
    local.submit(request)
    seen = local.poll(name)
    assert (seen.phase, seen.leftovers) == (Phase.EXITED, 0)
    assert starts(request) == []


def test_a_start_that_takes_too_long_is_found_later_and_not_repeated(
    jobs_dir: Path, new_request: NewRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = new_request()
    local = launcher(jobs_dir, "wait")
    monkeypatch.setattr("service.launchers.local._START_SECONDS", 0.0)
    with pytest.raises(LauncherUnavailable, match="did not start within 0 s"):
        local.submit(request)
    name = local.identify(request.job_id, 1)

    def found() -> bool:
        try:
            local.submit(request)
        except LauncherUnavailable:  # the process is there, and not yet the driver
            return False
        return local.poll(name).phase is Phase.RUNNING

    wait_until(found, "it starts", SECONDS)
    (request.job_dir / "go").touch()
    wait_until_exited(local, name)
    assert starts(request) == ["1"]
