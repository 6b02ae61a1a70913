"""Every other task: a raylet, for as long as task 0 is there."""

import contextlib
import signal
import socket
import time
from pathlib import Path

from megatron_backend.ray_nodes.meeting import START_SECONDS, TICK_SECONDS, Meeting, Peer
from megatron_backend.ray_nodes.process import RayProcess, StepFailed, machine, ray_folder
from megatron_backend.signals import END_SIGNALS


def follow(folder: Path) -> int:
    """Starts a raylet and waits for the end of task 0; the exit code.

    Args:
        folder: of the attempt.

    Raises:
        StepFailed: the raylet did not start, or has ended before.
    """
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the driver's matter; this task ends with task 0
    meeting = Meeting.await_at(folder / "ray.json")
    with contextlib.ExitStack() as stack:
        connection = socket.create_connection((meeting.host, meeting.port), 60.0)
        stack.callback(connection.close)
        leader = Peer(connection)
        leader.say(token=meeting.token)
        address = _ray_address(leader)
        own = ray_folder(stack)
        raylet = RayProcess(
            [f"--address={address}", f"--temp-dir={own}"],
            address=connection.getsockname()[0],
            log=own / "start.log",
            token=meeting.token,
        )
        stack.callback(raylet.kill)
        try:
            return _attend(leader, raylet)
        except StepFailed as error:
            leader.say(lost=str(error))
            while leader.hear(60.0) is not None:  # an end now would have srun end the driver
                pass
            raise


def _ray_address(leader: Peer) -> object:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        told = leader.hear(1.0)
        if told is None:
            break
        if told:
            return told["address"]
    raise StepFailed(f"task 0 has gone, or has no Ray, before {machine()} was up")


def _attend(leader: Peer, raylet: RayProcess) -> int:
    """Until task 0 has gone."""
    up = False
    while True:
        if not up and raylet.started():
            up = True
            leader.say(up=True)
        raylet.check()
        if leader.hear(TICK_SECONDS) is None:
            return 0
