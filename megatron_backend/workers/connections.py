"""The TCP connections of a rank, and how to end those to other ranks.

A rank that waits in a collective for one that will never come has to be woken, or it is as lost as
the other. Gloo has no call for that, but it fails at once when a connection ends. Which connections
are those between ranks, and not Ray's, is seen from both sides: one rank's local end is another
rank's remote end.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Connection:
    """One established connection: a file descriptor, and (address, port) of both ends."""

    descriptor: int
    local: tuple[str, int]
    remote: tuple[str, int]


def connections() -> list[Connection]:
    """Those of this process."""
    return [
        Connection(
            found.fd,
            (found.laddr.ip, found.laddr.port),
            (found.raddr.ip, found.raddr.port),
        )
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_ESTABLISHED and found.raddr
    ]


def between(of_ranks: Mapping[int, Sequence[Connection]]) -> dict[int, list[Connection]]:
    """The connections that lead from one of these ranks to another, of each rank."""
    ends = {(found.local, found.remote) for group in of_ranks.values() for found in group}
    return {
        rank: [found for found in group if (found.remote, found.local) in ends]
        for rank, group in of_ranks.items()
    }


def hang_up(chosen: Sequence[Connection]) -> None:
    """Ends connections of this process, whoever waits on them."""
    for found in chosen:
        # It may have ended meanwhile, and its number be another file's.
        with suppress(OSError), socket.socket(fileno=os.dup(found.descriptor)) as ours:
            if (ours.getsockname()[:2], ours.getpeername()[:2]) == (found.local, found.remote):
                ours.shutdown(socket.SHUT_RDWR)
