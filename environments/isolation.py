"""Calls functions in other processes, with a deadline that holds whatever they do.

A scorer gets text that a model wrote, and libraries' scorers were not written with that in mind:
one power tower keeps sympy busy for ever, inside C code that no thread can stop. So such calls run
in workers (see `environments.isolation_server`) that the kernel kills at their deadline. Workers
are kept for the next call; where all are busy another one is forked, so that 64 calls that hang
hang side by side and delay nothing else.

The other processes see none of our environment variables (tokens live there) and have a fixed hash
seed, so that what they draw does not depend on the run.
"""

import asyncio
import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from environments.isolation_server import encode_message, read_message

MAX_CONCURRENT_CALLS = 64
_MAX_IDLE = 8
_CORES = os.cpu_count() or 1
_QUEUE_SECONDS = 0.1
_GRACE_SECONDS = 0.5
"""A worker dies by its own timer, but a machine may be too busy to fork it, or to let it die."""
_START_SECONDS = 120.0
_END_SECONDS = 10.0


class IsolationError(Exception):
    """An isolated call gave no result."""


class CallTimeout(IsolationError):
    """The call ran into its deadline, and its process is gone."""


class WorkerDied(IsolationError):
    """The call's process died: out of memory, or a fault in C code."""


class CallFailed(IsolationError):
    """The called function raised; the text says what."""


class Isolation:
    """Workers for the functions of one module."""

    def __init__(self, module: str) -> None:
        """Starts nothing yet; `module` is imported over there, never here."""
        self._module = module
        self._lock = threading.Condition()
        self._idle: list[socket.socket] = []
        self._busy = 0
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="isolation")

    def call(self, function: str, argument: Any, *, timeout_seconds: float) -> Any:
        """`function(argument)` of the module, both ways as JSON.

        Raises:
            CallTimeout: no result within `timeout_seconds`, which begin when the module is loaded.
            WorkerDied: its process died on its own.
            CallFailed: it raised.
        """
        self._start()
        # The clock is the machine's, so both sides read the same time from it.
        deadline = time.monotonic() + timeout_seconds
        message = encode_message({"function": function, "argument": argument, "deadline": deadline})
        connection = self._idle_worker()
        try:
            connection = connection or self._new_worker()
            reply = _exchange(connection, message, timeout_seconds + _GRACE_SECONDS)
        finally:
            with self._lock:
                self._busy -= 1
        if reply is None:
            connection.close()
            if time.monotonic() >= deadline:
                raise CallTimeout(f"no result after {timeout_seconds:g} s")
            raise WorkerDied("the process died (out of memory, or a fault in C code)")
        self._keep(connection)
        if "error" in reply:
            raise CallFailed(f"{reply['error']['type']}: {reply['error']['message']}")
        return reply["result"]

    async def call_async(self, function: str, argument: Any, *, timeout_seconds: float) -> Any:
        """`call`, while other coroutines go on."""
        call = partial(self.call, function, argument, timeout_seconds=timeout_seconds)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Ends the other processes; a later call starts them again."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._server is not None:
                _end(self._server)
                self._server = None

    def _idle_worker(self) -> socket.socket | None:
        """A worker that waits for a call; None where it is time to fork another one."""
        with self._lock:
            # Calls that take a millisecond are better queued than forked for; hung ones are not.
            if self._busy >= _CORES:
                self._lock.wait_for(lambda: bool(self._idle), _QUEUE_SECONDS)
            self._busy += 1
            return self._idle.pop() if self._idle else None

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE and self._control is not None:
                self._idle.append(connection)
                self._lock.notify()
                return
        connection.close()

    def _new_worker(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._control is None:
                ours.close()
                raise WorkerDied("the processes were closed meanwhile")
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours

    def _start(self) -> None:
        """Starts the process that forks workers, where none runs, and waits for its import."""
        with self._lock:
            if self._server is not None and self._server.poll() is None:
                return
            if self._control is not None:
                self._control.close()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._server = _start_server(theirs, self._module)
            if _receive(self._control, _START_SECONDS) is None:
                _end(self._server)
                message = f"no process came up for {self._module}; its error is on standard error"
                raise WorkerDied(message)


@cache
def isolated(module: str) -> Isolation:
    """This process's workers for a module; they end with the process, however it ends."""
    isolation = Isolation(module)
    atexit.register(isolation.close)
    return isolation


def _start_server(control: socket.socket, module: str) -> subprocess.Popen[bytes]:
    server = "environments.isolation_server"
    return subprocess.Popen(
        [sys.executable, "-m", server, str(control.fileno()), module],
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
        env={
            "PATH": os.defpath,
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    """Waits for a process that should end by itself, such as one that tells its error."""
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _exchange(connection: socket.socket, request: bytes, seconds: float) -> Any | None:
    """The reply to a request; None where the worker is gone or silent."""
    connection.settimeout(seconds)
    try:
        connection.sendall(request)
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        return None
    return _receive(connection, seconds)


def _receive(connection: socket.socket, seconds: float) -> Any | None:
    connection.settimeout(seconds)
    try:
        return read_message(connection)
    except (ConnectionResetError, TimeoutError):
        return None


# A fork would share the sockets, and read the answers to its parent's calls.
os.register_at_fork(after_in_child=isolated.cache_clear)
