"""A server process that is killed (SIGKILL) at a line of its launcher's `submit`."""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import service.launchers
from service.launchers import ClusterConfig, LaunchRequest, Site
from service.reconciler import Reconciler, Timing
from service.store import Store

_TRACED = str(Path(service.launchers.__file__).parent)
AFTER = 10**9
"""As a line: when `submit` has done all and returns."""


class KillAtLine:
    """A trace function that counts lines of our launchers' code, and kills at number `line`."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_TRACED):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                die()
        return self


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve_until_killed(
    cluster: ClusterConfig, name: str, database: str, jobs_dir: Path, job_id: str, line: int
) -> NoReturn:
    """Runs rounds of a reconciler, which reach the job's `submit` before long."""
    os.umask(0)  # drivers may be of another user
    launcher: Any = cluster.open(Site(jobs_dir=jobs_dir))
    submit = launcher.submit

    def submit_and_die(request: LaunchRequest) -> None:
        if request.job_id != job_id:
            submit(request)
            return
        sys.settrace(KillAtLine(line))
        submit(request)
        die()

    launcher.submit = submit_and_die
    timing = Timing(lease=0.5)
    reconciler = Reconciler(
        Store.open(database), {name: launcher}, jobs_dir, "http://127.0.0.1:1", timing=timing
    )
    while True:
        reconciler.sweep()
        time.sleep(0.05)
