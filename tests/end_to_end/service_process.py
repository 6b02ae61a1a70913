"""A real service in a process of its own, which can be killed and started again."""

import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from service.client import Client
from tests.waiting import wait_until

READY_SECONDS = 120.0


class ServiceProcess:
    """`planish serve` over one data folder, always at the same address."""

    def __init__(
        self, folder: Path, *, port: int, model_root: Path, options: Sequence[str] = ()
    ) -> None:
        self.data_dir = folder / "data"
        self.url = f"http://127.0.0.1:{port}"
        self.key = "planish_" + secrets.token_urlsafe(32)
        self._log = folder / "service.log"
        planish = str(Path(sys.executable).with_name("planish"))
        self._command = [planish, "serve", "--data-dir", str(self.data_dir), "--port", str(port)]
        self._command += ["--model-root", str(model_root), "--no-save-connection", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        environment = {"PLANISH_BOOTSTRAP_KEY": self.key, "PATH": "/usr/bin:/bin"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        wait_until(
            self._ready,
            "the service is ready",
            READY_SECONDS,
            details=self._log.read_text,
            pause=0.1,
        )

    def kill(self) -> None:
        """kill -9: no line of the service runs after this."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """A clean end."""
        self._end(signal.SIGTERM)

    def client(self) -> Client:
        """A client with the first key."""
        return Client(self.url, self.key)

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False

    def _end(self, with_signal: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(with_signal)
            self._process.wait(timeout=30)
