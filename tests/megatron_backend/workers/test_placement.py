"""How many groups each machine gets, who is a neighbour of whom, and which machine is there."""

import socket

import pytest

from megatron_backend.workers import placement
from megatron_backend.workers.placement import bundle_sizes, bundles_of_groups
from service.spec.layout import Layout


@pytest.mark.parametrize(
    ("groups", "nodes", "sizes"),
    [
        (4, None, [1, 1, 1, 1]),  # each wherever it fits
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (7, 3, [3, 2, 2]),
        (2, 8, [1, 1]),  # no machine is without a rank
    ],
)
def test_machines_share_the_groups_evenly(groups: int, nodes: int | None, sizes: list[int]) -> None:
    assert bundle_sizes(groups, nodes=nodes) == sizes


def test_groups_on_one_machine_follow_each_other() -> None:
    """Ray puts single groups down in an order of its own."""
    assert bundles_of_groups([1, 1, 1, 1], {0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]
    assert bundles_of_groups([2, 2], {0: "b", 1: "a"}) == [0, 0, 1, 1]
    assert bundles_of_groups([3, 2], {0: "a", 1: "b"}) == [0, 0, 0, 1, 1]


def test_a_machine_is_asked_itself_whether_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's table may say so for a while after it is gone. The table is ours here; Ray's own is in
    `test_nodes`."""
    table = {"bundles": {0: {}}, "bundles_to_node_id": {0: "n1"}}
    monkeypatch.setattr(placement, "_reserve", lambda *_, **__: None)
    monkeypatch.setattr(placement, "placement_group_table", lambda _: table)
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        address, port = raylet.getsockname()
        node = {"NodeID": "n1", "NodeManagerAddress": address, "NodeManagerPort": port}
        monkeypatch.setattr(placement.ray, "nodes", lambda: [node])
        room = placement.Room(Layout(tp=2), gpu=False, nodes=1)
        for alive in (True, False):
            node["Alive"] = alive
            assert room.has_machine_of(1) is alive
    node["Alive"] = True
    assert not room.has_machine_of(1)
    monkeypatch.setattr(placement.ray, "nodes", lambda: [])
    assert not room.has_machine_of(1)
