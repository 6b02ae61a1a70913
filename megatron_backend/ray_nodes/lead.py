"""Task 0: the head of the step's Ray, and the driver."""

import contextlib
import hmac
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_backend.ray_nodes.meeting import (
    START_SECONDS,
    TICK_SECONDS,
    Meeting,
    Peer,
    own_address,
    run_id,
)
from megatron_backend.ray_nodes.process import (
    RayProcess,
    StepFailed,
    ray_environment,
    ray_folder,
    say,
)
from megatron_backend.signals import END_SIGNALS

LAST_WORDS_SECONDS = 60.0
"""How long the driver may take to say what it makes of a Ray that is gone."""
SAME_SIGNAL_SECONDS = 10.0
"""srun hands a signal on that SLURM has sent already; what comes so soon after is the same one."""

_HEAD_WITHOUT = ("--include-dashboard=false", "--no-monitor")
"""Nobody looks at this Ray from outside, and nothing scales it."""


class Signals:
    """Signals that came and were not handed on yet."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._last: dict[int, float] = {}
        for number in END_SIGNALS:
            signal.signal(number, self._receive)

    def take(self) -> list[int]:
        """Those that came since the last call."""
        taken, self._waiting = self._waiting, []
        return taken

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last.get(number, float("-inf")) >= SAME_SIGNAL_SECONDS:
            self._last[number] = now
            self._waiting.append(number)


def lead(folder: Path, tasks: int, driver: Sequence[str]) -> int:
    """Starts the head, waits for the others, and runs the driver; its exit code.

    Args:
        folder: of the attempt.
        tasks: of the step, this one among them.
        driver: the driver's command.

    Raises:
        StepFailed: the machines could not be brought together.
    """
    signals, token, host = Signals(), secrets.token_hex(32), own_address()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0), backlog=tasks))
        meeting = folder / "ray.json"
        stack.callback(meeting.unlink, missing_ok=True)
        port = int(listener.getsockname()[1])
        Meeting(
            run=run_id(), machine=socket.gethostname(), host=host, port=port, token=token
        ).write(meeting)
        head = start_head(host, token, stack)
        peers = Gathering(listener, tasks - 1, token, stack).wait(head, signals)
        variables = ray_environment(token) | {"RAY_ADDRESS": head.address}
        process = subprocess.Popen(driver, env=variables)
        stack.callback(process.kill)
        return watch(process, head, peers, signals)


def start_head(host: str, token: str, stack: contextlib.ExitStack) -> RayProcess:
    """The head of a new Ray, which ends with the stack."""
    folder = ray_folder(stack)
    head = RayProcess(
        [*_HEAD_WITHOUT, f"--temp-dir={folder}"],
        head=True,
        address=host,
        log=folder / "start.log",
        token=token,
    )
    stack.callback(head.kill)
    return head


class Gathering:
    """Waits for the other tasks.

    Args:
        listener: where they come.
        count: how many.
        token: what they must know.
        stack: closes their connections.
    """

    def __init__(
        self, listener: socket.socket, count: int, token: str, stack: contextlib.ExitStack
    ) -> None:
        self._listener, self._count, self._token, self._stack = listener, count, token, stack
        self._peers: list[Peer] = []
        self._told = self._up = 0
        listener.settimeout(TICK_SECONDS)

    def wait(self, head: RayProcess, signals: "Signals") -> list[Peer]:
        """Returns the others when they and the head are up.

        Raises:
            StepFailed: one could not start or did not come, or the job is told to end.
        """
        deadline = time.monotonic() + START_SECONDS
        while self._up < self._count or not head.started():
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"{self._up} of {self._count} other machines were up in {START_SECONDS:g} s"
                )
            for number in signals.take():
                raise StepFailed(f"told to end ({signal.Signals(number).name}) before Ray was up")
            self._accept()
            if head.started():
                for peer in self._peers[self._told :]:
                    peer.say(address=head.address)
                self._told = len(self._peers)
            for peer in self._peers:
                message = peer.hear(0.0)
                if message is None or "lost" in message:
                    raise StepFailed(lost(message))
                self._up += "up" in message
        return self._peers

    def _accept(self) -> None:
        with contextlib.suppress(TimeoutError):
            connection, _ = self._listener.accept()
            self._stack.callback(connection.close)
            peer = Peer(connection)
            hello = peer.hear(5.0) or {}
            token = str(hello.get("token")).encode(errors="replace")
            if hmac.compare_digest(token, self._token.encode()):
                self._peers.append(peer)
            else:
                connection.close()


def watch(
    driver: subprocess.Popen[bytes], head: RayProcess, peers: list[Peer], signals: Signals
) -> int:
    """Hands signals on until the driver has ended; its exit code."""
    kill_at: float | None = None
    while (code := driver.poll()) is None:
        for number in signals.take():
            driver.send_signal(number)
        for peer in list(peers):
            message = peer.hear(0.0)
            if message is None or "lost" in message:
                say(lost(message))  # the driver sees its ranks go, and decides
                peers.remove(peer)
        if kill_at is None:
            try:
                head.check()
            except StepFailed as error:
                say(f"{error}\nthe driver has {LAST_WORDS_SECONDS:g} s to say so")
                kill_at = time.monotonic() + LAST_WORDS_SECONDS
        elif time.monotonic() > kill_at:
            driver.kill()
        time.sleep(TICK_SECONDS)
    return code if code >= 0 else 128 - code


def lost(message: dict[str, object] | None) -> str:
    """What a machine said last, or that it has gone without a word."""
    return f"a machine is gone: {(message or {}).get('lost', 'its task has ended')}"
