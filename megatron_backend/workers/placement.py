"""Room for the ranks in the cluster."""

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from megatron_backend.workers.errors import NodeLost, NoRoom
from megatron_backend.workers.ray_session import dead_processes
from service.spec.layout import Layout

PLACEMENT_SECONDS = 600.0
"""How long the cluster may take to find room for all ranks."""


def reserve(layout: Layout, *, gpu: bool) -> PlacementGroup:
    """Room for all ranks or none, with each tensor-parallel group inside one machine.

    Raises:
        NoRoom: the cluster found none.
    """
    bundle = {"CPU": float(layout.tp)}
    if gpu:
        bundle["GPU"] = float(layout.tp)
    group = placement_group([dict(bundle) for _ in range(layout.world_size // layout.tp)], "PACK")
    if not group.wait(PLACEMENT_SECONDS):
        remove_placement_group(group)
        raise NoRoom(
            f"the cluster found no room for {layout.world_size} ranks ({bundle} on one machine, "
            f"{layout.world_size // layout.tp} times) in {PLACEMENT_SECONDS:.0f} s"
        )
    return group


def check_nodes(room: PlacementGroup, *, group: str = "") -> None:
    """Raises NodeLost where a machine that holds some of the room is gone, or Ray itself is.

    Args:
        room: as `reserve` gave it.
        group: name of the group that it is for; see `RanksFailed`.
    """
    if dead := dead_processes():  # Ray's own look at it takes many seconds
        raise NodeLost(0, f"Ray's own processes have died: {', '.join(dead)}")
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for bundle, node in placement_group_table(room)["bundles_to_node_id"].items():
        if node not in alive:
            gone = f"its machine (Ray's node {node or 'unknown'}) is gone"
            raise NodeLost(int(bundle), gone, group=group)


def release(group: PlacementGroup) -> None:
    """Gives the room back."""
    remove_placement_group(group)
