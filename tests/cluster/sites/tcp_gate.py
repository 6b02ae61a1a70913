"""A way to a server that can be closed: the server is away for those who go through it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Gate:
    """Forwards TCP connections from a free port of the loopback interface."""

    def __init__(self, host: str, port: int) -> None:
        """Forwards to `host:port` from now on."""
        self._target = (host, port)
        self._lock = threading.Lock()
        self._closed = False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside the block every connection is reset, those that are open already too."""
        with self._lock:
            self._closed = True
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            with self._lock:
                self._closed = False

    def close(self) -> None:
        """Ends it for good."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.socket() as server:
            with self._lock:
                if self._closed:
                    return
                self._open |= {client, server}
            try:
                server.connect(self._target)
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()
            except OSError:
                return
            finally:
                with self._lock:
                    self._open -= {client, server}


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
