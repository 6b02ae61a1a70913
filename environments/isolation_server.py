"""The far side of `environments.isolation`: a process that forks a worker for each connection.

Run as `python -m environments.isolation_server FD MODULE`, with FD one end of a Unix socket pair.
MODULE is imported once, which FD is told; then each message on FD carries the worker's end of a new
socket pair. Workers are forks, so they start in milliseconds with the module loaded.

A worker serves one call after another. Before each it sets a timer of the kernel whose signal kills
it: no exception that the called code could catch, no thread that a long step of C could hold up.
When the other side goes away, reading returns nothing, and every process here ends by itself.
"""

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

MEMORY_BYTES = 2 << 30
NICENESS = 5
"""Workers that run wild leave the processor to those that fork and feed them, and to training."""
MAX_MESSAGE_BYTES = 256 << 20
OPEN_FILES = 64


def read_message(connection: socket.socket) -> Any | None:
    """The next JSON message; None where the other side has closed."""
    header = _read_exactly(connection, 4)
    if header is None:
        return None
    length = int.from_bytes(header)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {length} bytes")
    body = _read_exactly(connection, length)
    return None if body is None else json.loads(body)


def encode_message(message: Any) -> bytes:
    """A message as it is sent: its length in four bytes, then JSON.

    Raises:
        TypeError: not JSON.
        ValueError: not JSON, or too long.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(body)} bytes")
    return len(body).to_bytes(4) + body


def _read_exactly(connection: socket.socket, length: int) -> bytes | None:
    chunks: list[bytes] = []
    missing = length
    while missing:
        chunk = connection.recv(min(missing, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def serve(control: socket.socket, module: ModuleType) -> None:
    """Forks a worker for each connection that arrives, until `control` closes."""
    # The kernel reaps the workers. A signal to the whole process group is for the other side to
    # act on: it may have rollouts to finish first.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()
    control.sendall(encode_message({"ready": os.getpid()}))
    while True:
        wish, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not wish:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                _limit()
                work(connection, module)
                # Not `sys.exit`: this is a fork, and the parent's clean-up is not its own.
                os._exit(0)


def work(connection: socket.socket, module: ModuleType) -> None:
    """Serves calls of the module's functions until the other side closes."""
    while (request := read_message(connection)) is not None:
        function: Callable[[Any], Any] = getattr(module, request["function"])
        # Waiting for the processor counts, too; zero would mean no timer at all.
        left = max(request["deadline"] - time.monotonic(), 1e-3)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            reply = encode_message({"result": function(request["argument"])})
        except Exception as error:  # whatever it is, it is the caller's to know
            fault = {"type": type(error).__name__, "message": str(error)[:1000]}
            reply = encode_message({"error": fault})
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(reply)


def _limit() -> None:
    """Takes from a worker what no scorer needs: memory without end, files to write, our streams."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), importlib.import_module(sys.argv[2]))
