"""Processes that a driver needs until it has ended do not see what ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_backend.signals import END_SIGNALS, signals_blocked
from tests.waiting import wait_until

IGNORING = """
import os, signal, threading
from megatron_backend.signals import END_SIGNALS, ignore_signals
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))  # as Ray's workers have it
other = threading.Thread(target=ignore_signals)
other.start()
other.join()
for number in END_SIGNALS:
    os.kill(os.getpid(), number)
print("alive")
"""


def test_a_process_ignores_them_whichever_of_its_threads_says_so() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IGNORING], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "alive\n"), run.stderr


def test_children_and_theirs_do_not_get_them(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    with signals_blocked():
        child = subprocess.Popen(["bash", "-c", script])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    pid = tmp_path / "pid"
    grandchild = int(
        wait_until(lambda: pid.read_text() if pid.exists() else "", "the child has a child")
    )
    for number in END_SIGNALS:
        child.send_signal(number)
        os.kill(grandchild, number)
    time.sleep(0.3)
    assert child.poll() is None
    os.kill(grandchild, signal.SIGKILL)  # raises where it has ended
    assert child.wait(60) == 0
