"""A service process that is killed at a line of its own code.

It runs the reconciler's rounds under a trace function that counts the lines executed in the store,
the reconciler and the launchers, and sends itself SIGKILL when the count is reached.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import service
from service.launchers import processes
from service.launchers.local import LocalLauncher
from service.reconciler import Reconciler, Timing
from service.store import Store
from tests.service.reconciler.services import DRIVER

_PACKAGE = str(Path(service.__file__).parent)
# It only reads /proc, process by process: many lines at which a kill makes no difference.
_UNTRACED = processes.__file__
_TRACED = tuple(f"{_PACKAGE}/{name}/" for name in ("store", "reconciler", "launchers", "jobs"))


class KillAtLine:
    """Counts lines of our code; kills this process at number `line`, or never."""

    def __init__(self, line: int | None) -> None:
        self.count = 0
        self._line = line

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file == _UNTRACED or not file.startswith(_TRACED):
            return None
        if event == "line":
            self.count += 1
            if self.count == self._line:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def run_service(folder: Path, job_id: str, behaviours: list[str], kill_at: int | None) -> None:
    """Runs rounds until the job ends; writes the number of lines that took to FOLDER/lines."""
    store = Store.open(f"sqlite:///{folder}/planish.db")
    command = [sys.executable, "-I", "-S", str(DRIVER), *behaviours]
    launcher = LocalLauncher(folder / "jobs", command=command, poll_seconds=0.02)
    reconciler = Reconciler(
        store,
        {"local": launcher},
        folder / "jobs",
        "http://127.0.0.1:1",
        timing=Timing(lease=0.1, retry_base=0.01),
    )
    tracer = KillAtLine(kill_at)
    sys.settrace(tracer)
    while not store.jobs.get(job_id).state.terminal:
        reconciler.sweep()
        time.sleep(0.02)
    sys.settrace(None)
    (folder / "lines").write_text(str(tracer.count))
