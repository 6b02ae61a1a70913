"""Ending the connections between two processes wakes whoever waits on them, and nobody else."""

import socket
import threading
from collections.abc import Iterator

import pytest

from megatron_backend.workers.connections import Connection, between, connections, hang_up


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Two connections of this process with itself: both ends of each are here."""
    made = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(2):
            near = socket.create_connection(server.getsockname())
            far, _address = server.accept()
            made.append((near, far))
    yield made
    for near, far in made:
        near.close()
        far.close()


def of(ends: socket.socket) -> Connection:
    (found,) = [c for c in connections() if c.descriptor == ends.fileno()]
    return found


def test_connections_between_ranks_are_those_that_both_sides_have(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (near, far), (foreign, _) = pairs
    ranks = {0: [of(near), of(foreign)], 1: [of(far)]}
    assert between(ranks) == {0: [of(near)], 1: [of(far)]}


def test_hanging_up_wakes_whoever_waits(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (near, far), (other_near, other_far) = pairs
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(near.recv(1)), daemon=True)
    waiting.start()
    chosen = [of(near)]
    hang_up(chosen)
    waiting.join(30)
    assert received == [b""]
    assert far.recv(1) == b""
    other_near.sendall(b"x")  # this one still stands
    assert other_far.recv(1) == b"x"


def test_a_number_that_belongs_to_another_file_by_now_is_left_alone(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (near, _), (other_near, other_far) = pairs
    stale = Connection(other_near.fileno(), of(near).local, of(near).remote)
    hang_up([stale, Connection(10**6, ("127.0.0.1", 1), ("127.0.0.1", 2))])
    other_near.sendall(b"x")
    assert other_far.recv(1) == b"x"
