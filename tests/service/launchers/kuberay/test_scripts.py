"""The shell text that pods run, given to the shell."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from service.launchers.kuberay.scripts import EXIT_SHUT_OUT, entrypoint, hooks
from tests.waiting import wait_until

SECONDS = 20.0


class Pod:
    """A folder that stands for a pod's, and a job's folder with a name that a shell would like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job_dir = folder / "it's $(touch pwned); {x}"
        self.attempt = self.job_dir / "attempts/1"
        self.attempt.mkdir(parents=True)
        self.counter = folder / "oom_control"
        self.counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")

    def driver(self, body: str) -> Path:
        path = self.folder / "driver"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def start(self, driver: Path, uid: str = "uid-1") -> subprocess.Popen[bytes]:
        text = entrypoint(
            str(driver), self.job_dir, 1, scratch=str(self.folder), counters=str(self.counter)
        )
        return subprocess.Popen(
            # A shell cannot trap what was ignored when it began, as INT is in a background job's.
            ["env", "--default-signal=INT", "/bin/sh", "-c", text],
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "PLANISH_POD_UID": uid},
        )

    def hook(self, role: str) -> subprocess.Popen[bytes]:
        text = hooks(self.job_dir, 1, scratch=str(self.folder))[role]
        return subprocess.Popen(["/bin/sh", "-c", text])


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_g07_the_driver_gets_its_arguments_as_they_are(pod: Pod) -> None:
    driver = pod.driver('for word; do echo "$word"; done > words; exit 5')
    assert pod.start(driver).wait(SECONDS) == 5
    words = (pod.attempt / "words").read_text().splitlines()
    assert words == ["-m", "megatron_backend", str(pod.job_dir), "--attempt", "1", "--log"]
    assert not list(pod.folder.rglob("pwned"))
    assert not (pod.attempt / "oom").exists()


def test_g11_the_first_start_leaves_its_pods_uid(pod: Pod) -> None:
    driver = pod.driver("exit 0")
    for uid in ("uid-1", "uid-2"):
        assert pod.start(driver, uid).wait(SECONDS) == 0
    assert (pod.attempt / "head").read_text() == "uid-1\n"


def test_an_attempt_that_was_shut_out_does_not_start(pod: Pod) -> None:
    (pod.attempt / "shut-out").touch()
    assert pod.start(pod.driver("touch started")).wait(SECONDS) == EXIT_SHUT_OUT
    assert sorted(path.name for path in pod.attempt.iterdir()) == ["shut-out"]


def test_a_driver_that_the_kernel_killed_for_memory_is_told_from_others(pod: Pod) -> None:
    killed = pod.driver("kill -9 $$")
    assert pod.start(killed).wait(SECONDS) == 137
    assert not (pod.attempt / "oom").exists()
    pod.counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert pod.start(killed).wait(SECONDS) == 137
    assert (pod.attempt / "oom").exists()


COUNTS_TERMS = """\
trap 'echo term >> terms' TERM
touch ready
while [ ! -e stop-it ]; do sleep 0.05; done
touch outcome.json
exit 1"""


def test_however_many_ask_a_driver_gets_term_once_and_pods_wait_for_its_end(pod: Pod) -> None:
    command = pod.start(pod.driver(COUNTS_TERMS))
    wait_until((pod.attempt / "ready").exists, "the driver is ready", SECONDS)
    os.kill(command.pid, signal.SIGINT)  # Ray's Jobs API, as RAY_JOB_STOP_SIGNAL says
    wait_until((pod.attempt / "terms").exists, "the driver gets SIGTERM", SECONDS)
    head, worker = pod.hook("head"), pod.hook("worker")
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.5)
    assert [each.poll() for each in (command, head, worker)] == [None] * 3
    (pod.attempt / "stop-it").touch()
    assert command.wait(SECONDS) == 1
    assert (head.wait(SECONDS), worker.wait(SECONDS)) == (0, 0)
    assert (pod.attempt / "terms").read_text() == "term\n"
    assert (pod.attempt / "ending").exists()


def test_a_wish_that_comes_as_the_driver_starts_is_not_lost(pod: Pod) -> None:
    asks_at_once = COUNTS_TERMS.replace("touch ready\n", "touch ready\nkill -INT $PPID\n")
    command = pod.start(pod.driver(asks_at_once))
    wait_until((pod.attempt / "terms").exists, "the driver gets SIGTERM", SECONDS)
    (pod.attempt / "stop-it").touch()
    assert command.wait(SECONDS) == 1
    assert (pod.attempt / "terms").read_text() == "term\n"


def test_a_head_without_a_driver_and_a_worker_without_its_head_wait_for_nothing(pod: Pod) -> None:
    assert pod.hook("head").wait(SECONDS) == 0
    begun = time.monotonic()
    assert pod.hook("worker").wait(SECONDS) == 0
    assert 1 < time.monotonic() - begun < 15
    assert not (pod.attempt / "ending").exists()
