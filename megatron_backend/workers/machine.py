"""What a rank finds out about its machine: cores for it, the network to the others.

A Ray that others have started knows nothing of ranks. It gives each of its processes one thread,
and gloo, left to itself, takes the interface that the machine's own name resolves to, which is
often the loopback: then ranks of other machines wait for it for ever. The interface that is wanted
is the one that leads to the others, which the kernel's routing table knows.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """What a rank has to know of its machine and the others.

    Attributes:
        ranks: of the job on its machine.
        cpus: of its machine, as Ray counts them.
        peers: addresses of the other machines of its model; empty where there are none.
    """

    ranks: int
    cpus: int
    peers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is.

    Attributes:
        address: of its machine.
        port: free on that machine.
        node: Ray's id of the machine.
        pid: of its process, as its machine numbers processes.
        gpu: what CUDA calls its GPU; None where it has none.
    """

    address: str
    port: int
    node: str
    pid: int
    gpu: str | None


def threads(around: Neighbourhood) -> int:
    """How many threads a rank may use: its share of the cores, at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), around.cpus) // around.ranks)


def interface_towards(address: str) -> str | None:
    """Name of this machine's interface from which packets to an address leave; None if unknown.

    Nothing is sent.
    """
    try:
        (family, kind, _, _, target), *_ = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == own for found in addresses):
            return name
    return None


class RankNetwork:
    """Which interface gloo takes in this process; an operator's own word counts more."""

    def __init__(self) -> None:
        self._given = GLOO_INTERFACE in os.environ

    def face(self, peers: Sequence[str]) -> None:
        """From now on process groups reach these machines; where there are none, only this one."""
        if self._given:
            return
        interface = interface_towards(peers[0] if peers else "127.0.0.1")
        if interface is None:
            os.environ.pop(GLOO_INTERFACE, None)
        else:
            os.environ[GLOO_INTERFACE] = interface
