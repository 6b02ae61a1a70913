"""The service as a process of its own, just as an operator would start it."""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

START_SECONDS = 180.0


class PeakMemory:
    """Largest resident memory of this process and all below it, watched twice a second.

    A page that several processes share (libraries, a forked checkpoint writer) counts once: each
    process is charged its share (PSS). That is dear to ask for, so it is asked only where plain
    RSS, which counts shared pages once for each process, reaches a new height.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._highest_rss = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.5):
            processes = [me, *me.children(recursive=True)]
            rss = _sum(processes, lambda process: process.memory_info().rss)
            if rss > self._highest_rss:
                self._highest_rss = rss
                pss = _sum(processes, lambda process: process.memory_full_info().pss)
                self.bytes = max(self.bytes, pss)


def _sum(processes: list[psutil.Process], measure: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        # A process may end between the listing and the look at it.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += measure(process)
    return total


@contextlib.contextmanager
def running_service(data_dir: Path, *, port: int, model_root: Path) -> Iterator[tuple[str, str]]:
    """Starts `planish serve`, waits until it is ready, and ends it afterwards.

    Yields:
        The service's URL and an API key.

    Raises:
        RuntimeError: the service ended or did not get ready; its log says why.
    """
    key = "planish_" + secrets.token_urlsafe(32)
    url = f"http://127.0.0.1:{port}"
    log = data_dir.parent / "service.log"
    planish = Path(sys.executable).parent / "planish"
    command = [str(planish), "serve", "--data-dir", str(data_dir), "--port", str(port)]
    command += ["--model-root", str(model_root)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PLANISH_BOOTSTRAP_KEY": key},
        )
    try:
        _wait_until_ready(process, url, log)
        yield url, key
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the service ended at its start; see {log}\n{log.read_text()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", timeout=5).is_success:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the service was not ready after {START_SECONDS:.0f} s; see {log}")
