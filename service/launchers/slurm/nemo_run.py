"""SLURM's commands by NeMo-Run's tunnels, which live in a process and an environment of their own.

NeMo-Run pins versions of libraries that the service has others of, so it cannot be imported here
(docs/decisions/0006-nemo-run-in-a-process.md). `nemo_run_program.py` is run by the interpreter that
the operator names, and talks in lines of JSON: a request `{"id", "command", "text"}` on its input,
an answer `{"id", "code", "output", "errors"}` or `{"id", "fault"}` on its output.

The command arrives there as a list of words; the program quotes it for the shell that the tunnel's
far end starts. A program that dies or is silent is ended, and the next command starts another.
"""

import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.launchers.protocol import LauncherUnavailable
from service.launchers.slurm.config import NemoRunTunnelConfig, SshTunnelConfig
from service.launchers.slurm.tunnel import Ran, command_environment

PROGRAM = Path(__file__).with_name("nemo_run_program.py")
START_SECONDS = 120.0
"""Importing NeMo-Run takes seconds, and a busy machine longer; so does a login node's sshd."""


class NemoRunTunnel:
    """One connection, for one command after the other."""

    def __init__(
        self,
        config: NemoRunTunnelConfig | SshTunnelConfig,
        *,
        seconds: float,
        variables: Mapping[str, str],
    ) -> None:
        """Starts nothing yet.

        Args:
            config: which tunnel, and where to.
            seconds: how long a command may take.
            variables: set for each command.
        """
        self._config = config
        self._seconds = seconds
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._home: str | None = None
        self._unread = b""
        self._number = 0

    def run(self, command: Sequence[str], *, text: str = "", keep: int | None = None) -> Ran:
        """Runs a command at the tunnel's far end; see `Tunnel`.

        `keep` is of no use: what holds a lock here has no part in a process that is elsewhere. The
        batch script itself sees to it that a job which was submitted twice runs once.
        """
        del keep
        words = list(command)
        if self._variables:
            words = ["env", *(f"{name}={value}" for name, value in self._variables.items()), *words]
        with self._lock:
            self._number += 1
            request = {"id": self._number, "command": shlex.join(words), "text": text}
            try:
                answer = self._ask(request)
            except BaseException:
                self._end()  # what it answers later belongs to no request
                raise
        if "fault" in answer:
            raise LauncherUnavailable(f"{command[0]} by NeMo-Run's tunnel: {answer['fault']}")
        return Ran(
            code=int(answer["code"]), output=str(answer["output"]), errors=str(answer["errors"])
        )

    def close(self) -> None:
        """Ends the process, and with it the connection."""
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, object]) -> Mapping[str, Any]:
        process = self._started()
        line = json.dumps(request).encode() + b"\n"
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            raise LauncherUnavailable(f"NeMo-Run's tunnel has ended: {error}") from error
        while True:
            answer = json.loads(self._read_line(process, self._seconds))
            if answer.get("id") == request["id"]:
                found: Mapping[str, Any] = answer
                return found

    def _started(self) -> subprocess.Popen[bytes]:
        """The program, connected.

        Raises:
            LauncherUnavailable: it cannot be started, or could not connect.
        """
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        config = self._config
        try:
            self._home = tempfile.mkdtemp(prefix="nemo-run-")
            wanted = json.dumps({"home": self._home, **_connection(config)})
            command = [config.nemo_run_python, "-I", str(PROGRAM), wanted]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=command_environment({}),
                start_new_session=True,
            )
        except OSError as error:
            raise LauncherUnavailable(f"NeMo-Run's interpreter does not start: {error}") from error
        hello = json.loads(self._read_line(self._process, START_SECONDS))
        if "fault" in hello:
            raise LauncherUnavailable(f"NeMo-Run's tunnel: {hello['fault']}")
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LauncherUnavailable(f"NeMo-Run's tunnel gave no answer within {seconds:g} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise LauncherUnavailable("NeMo-Run's tunnel has ended; see the service's log")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self) -> None:
        process, home = self._process, self._home
        self._process, self._home, self._unread = None, None, b""
        if process is not None:
            _kill(process)
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was left in it has no reader
                pipe.close()
    process.wait()


def _connection(config: NemoRunTunnelConfig | SshTunnelConfig) -> dict[str, object]:
    if isinstance(config, NemoRunTunnelConfig):
        return {"type": "local"}
    return {
        "type": "ssh",
        "host": config.host,
        "user": config.user,
        "port": config.port,
        "identity": config.identity,
    }
