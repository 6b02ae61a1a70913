"""Ray's processes on one machine, and what they are started with."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_backend.ray_settings import NO_BYTECODE, OBJECT_STORE_BYTES, QUIET, guarded
from megatron_backend.signals import signals_blocked

START_TRIES = 5
_STARTED = b"Ray runtime started"


class StepFailed(Exception):
    """The machines could not be brought together; the message says what failed, and where."""


class RayProcess:
    """`ray start --block` and all that comes out of it, on this machine.

    Args:
        arguments: of `ray start`, beside those that all have.
        head: whether it is the head of a new Ray, on a free port, another one at each try: what
            kept it from starting may be that the port was taken meanwhile.
        address: of this machine, as the others reach it.
        log: file for its output.
        token: without it nobody can use this Ray.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        head: bool = False,
        address: str,
        log: Path,
        token: str,
    ) -> None:
        self._log = log
        self._head, self._host, self._port = head, address, 0
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            f"--node-ip-address={address}",
            f"--num-cpus={max(cpus_given(), gpus_given())}",  # a rank asks for one, beside its GPU
            f"--num-gpus={gpus_given()}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            # Free ports, since another job's Ray may be on this machine.
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            "--disable-usage-stats",
            *arguments,
        ]
        self._command, self._token = command, token
        self._tries_left = START_TRIES
        self._up = False
        self._process = self._spawn()

    @property
    def address(self) -> str:
        """Of a head, as RAY_ADDRESS takes it; settled once it is up."""
        return f"{self._host}:{self._port}"

    def started(self) -> bool:
        """Whether it is up. Where it ended before that, it is tried again: Ray gives its own
        processes 30 s, whatever else the machine has to do.

        Raises:
            StepFailed: it has ended once more.
        """
        if not self._up and self._process.poll() is not None and self._tries_left:
            say(f"Ray did not start on {machine()}, and is tried again")
            self.kill()
            self._process = self._spawn()
        self.check()
        self._up = self._up or _STARTED in self._log.read_bytes()
        return self._up

    def check(self) -> None:
        """Raises StepFailed where a process of it has ended, which ends the others too."""
        code = self._process.poll()
        if code is not None and (self._up or not self._tries_left):
            words = self._log.read_text(errors="replace")[-2000:]
            raise StepFailed(f"Ray has ended on {machine()} (code {code}):\n{words}")

    def kill(self) -> None:
        """Ends all of it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._tries_left -= 1
        command = self._command
        if self._head:
            self._port = free_port()
            command = [*command, "--head", f"--port={self._port}"]
        with self._log.open("wb") as output, signals_blocked():
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=ray_environment(self._token),
                start_new_session=True,
            )


def ray_folder(stack: contextlib.ExitStack) -> Path:
    """A new folder for Ray on this machine, which goes with the stack.

    Each machine has its own: a Ray that is told none takes the head's path, and leaves it there.
    """
    parent = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    parent.mkdir(parents=True, exist_ok=True)
    # Short, since the paths of Ray's sockets may not be longer than 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="planish-ray-", dir=parent))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def ray_environment(token: str) -> dict[str, str]:
    """What Ray's processes, the ranks and the driver have in their environment."""
    kept = {name: value for name, value in os.environ.items() if name != NO_BYTECODE}
    return kept | QUIET | guarded(token)


def cpus_given() -> int:
    """CPUs of this machine that SLURM gave the job."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))


def gpus_given() -> int:
    """GPUs of this machine that SLURM gave the job."""
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)


def free_port() -> int:
    """A port that is free just now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def machine() -> str:
    """This machine's name, as SLURM has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def say(text: str) -> None:
    """A line of the job's log."""
    sys.stderr.write(f"planish: {text}\n")
    sys.stderr.flush()
