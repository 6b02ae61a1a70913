"""How the tasks of a step find each other, and what they say."""

import contextlib
import json
import os
import secrets
import select
import socket
import time
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path

from megatron_backend.ray_nodes.process import StepFailed
from service.spec.durable import write_text

START_SECONDS = 600.0
"""How long all machines may take to be there, with Ray, on a busy file system."""
TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where task 0 listens."""

    run: str
    """Tells this run of the step from others in the same attempt's folder."""
    machine: str
    """The name that it gives itself."""
    host: str
    port: int
    token: str
    """Who does not have it is not heard, and cannot use this step's Ray."""

    def write(self, path: Path) -> None:
        """Leaves it for the others, readable for this user alone."""
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        write_text(fresh, json.dumps(asdict(self)), mode=0o600)
        os.replace(fresh, path)

    @staticmethod
    def await_at(path: Path) -> "Meeting":
        """What task 0 of this run wrote.

        Raises:
            StepFailed: nothing, for too long; or it is on another machine, and cannot be reached.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                os.listdir(path.parent)  # a network file system may remember that it was not there
                found = Meeting(**json.loads(path.read_text(encoding="ascii")))
                if found.run == run_id():  # not what an earlier run left
                    return found._reachable()
            time.sleep(TICK_SECONDS)
        raise StepFailed(f"task 0 did not write {path} within {START_SECONDS:g} s")

    def _reachable(self) -> "Meeting":
        if ip_address(self.host).is_loopback and self.machine != socket.gethostname():
            raise StepFailed(
                f"task 0 is on {self.machine}, which knows no address of its own but {self.host}: "
                "give the machines a default route, or their names an address in /etc/hosts"
            )
        return self


class Peer:
    """The other end of a connection between task 0 and another: lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unread = b""

    def say(self, **message: object) -> None:
        """Sends a message; one that is gone gets none."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, seconds: float) -> dict[str, object] | None:
        """The next message; empty where none came in time, null where the other has gone, or
        speaks another language: a port scan asks for a web page."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.connection], [], [], left)[0]:
                return {}
            try:
                part = self.connection.recv(4096)
            except OSError:
                part = b""
            if not part or len(self._unread) > 1 << 16:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


def run_id() -> str:
    """Of this run of the step, the same on all machines."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return ".".join(os.environ.get(name, "0") for name in names)


def own_address() -> str:
    """This machine's address on the way out; no packet is sent.

    Where there is no way out, the address of its name, of SLURM's name for it, or the one that
    SLURM says the step was launched from: the first that is its own and not the loopback, which
    Debian gives a machine's name.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    names = ("SLURMD_NODENAME", "SLURM_LAUNCH_NODE_IPADDR")
    found = map(_own, [socket.gethostname(), *(os.environ.get(name, "") for name in names)])
    return next((address for address in found if address is not None), "127.0.0.1")


def _own(name: str) -> str | None:
    """The address of that name, where it is this machine's and others may reach it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = socket.gethostbyname(name)
        probe.bind((address, 0))
        parsed = ip_address(address)
        return None if parsed.is_loopback or parsed.is_unspecified else address
    return None
