"""A server process that is killed (SIGKILL) at a line of its launcher's `submit`."""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import service.launchers
from service.launchers import ClusterConfig, Launcher, Site
from service.reconciler import Reconciler, Timing
from service.store import Store

_TRACED = str(Path(service.launchers.__file__).parent)
AFTER = 10**9
"""As a line: when `submit` has done all and returns."""


class KillInSubmit:
    """Counts lines of our launchers' code inside the `submit` of one job; kills this process at
    number `line`, or when `submit` returns."""

    def __init__(self, launcher: Launcher, job_id: str, line: int) -> None:
        self._code = type(launcher).submit.__code__
        self._job_id = job_id
        self._inside = False
        self._left = line

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_TRACED):
            return None
        whole = frame.f_code is self._code
        if whole and event == "call":
            self._inside = frame.f_locals["request"].job_id == self._job_id
        if self._inside and event == "line":
            self._left -= 1
        if self._inside and (self._left <= 0 or (whole and event == "return")):
            os.kill(os.getpid(), signal.SIGKILL)
        return self


def serve_until_killed(
    cluster: ClusterConfig, name: str, database: str, jobs_dir: Path, job_id: str, line: int
) -> None:
    """Runs rounds of a reconciler, which reach the job's `submit` before long."""
    os.umask(0)  # drivers may be of another user
    store = Store.open(database)
    launcher = cluster.open(Site(jobs_dir=jobs_dir))
    reconciler = Reconciler(
        store, {name: launcher}, jobs_dir, "http://127.0.0.1:1", timing=Timing(lease=0.5)
    )
    sys.settrace(KillInSubmit(launcher, job_id, line))
    while True:
        reconciler.sweep()
        time.sleep(0.05)
