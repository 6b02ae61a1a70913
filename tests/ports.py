"""Ports for the servers that tests start."""

import errno
import random
import socket

# Below those that Linux gives to whoever asks for any (32768 to 60999, where nobody set others), of
# which a connection of somebody else could get one before its server listens; and below those that
# Kubernetes gives to services (from 30000).
_PORTS = range(20_000, 30_000)
_TRIES = 1000


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listens on just now.

    Raises:
        OSError: `host` is no address of this machine.
    """
    for _ in range(_TRIES):
        # Not of a seed, which would give the processes of one run the same ports.
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"{host} has no free port from {_PORTS[0]} to {_PORTS[-1]}")
