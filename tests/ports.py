"""Ports for the servers that tests start."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listens on just now.

    Raises:
        OSError: `host` is no address of this machine.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
