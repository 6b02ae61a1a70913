"""Room for the ranks of a model on the machines of a cluster.

A tensor-parallel group talks in every layer, so it is never split between machines. Groups follow
each other through context, data and pipeline parallelism, in that order, so neighbours by number
are put on the same machine.

- With GPUs, a group takes its GPUs wherever they are, on as few machines as will do.
- On CPUs, Ray would put any number of ranks on one machine. There `resources.nodes` says how many
  machines share the groups, as evenly as can be.

A machine that is lost takes its part of the room along. Ray looks for another by itself, if there
is one; `refill` waits for that. Ray takes many seconds to see that a machine is gone, though, and
the first that a driver sees is a dead rank. So a machine is asked directly whether it is there: its
raylet accepts a connection, or it does not.
"""

import math
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_backend.workers.errors import NodeLost, NoRoom
from megatron_backend.workers.machine import Neighbourhood
from megatron_backend.workers.ray_session import dead_processes, own_cluster
from service.spec import driver_variables
from service.spec.layout import Layout

PLACEMENT_SECONDS = 600.0
"""How long the cluster may take to find room for all ranks."""
NODE_WAIT_SECONDS = 30.0
"""Where the launcher names no time: a machine that is free already is found in this one."""
NOTICE_SECONDS = 60.0
"""How long Ray may take to see that a machine is gone."""
CONNECT_SECONDS = 2.0


class Room:
    """Room for all ranks of a layout, or none.

    Args:
        layout: of the model.
        gpu: a GPU for each rank.
        nodes: `resources.nodes`.
        group: name of the model in errors; see `RanksFailed`.

    Raises:
        NoRoom: the cluster found none.
    """

    def __init__(self, layout: Layout, *, gpu: bool, nodes: int, group: str = "") -> None:
        self._layout, self._name = layout, group
        evenly = nodes > 1 and not gpu
        sizes = bundle_sizes(layout.world_size // layout.tp, nodes=nodes if evenly else None)
        self._group = _reserve([size * layout.tp for size in sizes], gpu=gpu, evenly=evenly)
        self._nodes = self._held()
        self._bundles = bundles_of_groups(sizes, self._nodes)

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """How Ray is told to start a rank in its place."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundle(rank)
        )

    def neighbourhoods(self, processes: int) -> Sequence[Neighbourhood | None]:
        """Of each rank; None in a Ray of the driver's own, where all of that is arranged.

        Args:
            processes: ranks of all models of the job.
        """
        if own_cluster():
            return [None] * self._layout.world_size
        known = {node["NodeID"]: node for node in ray.nodes()}
        places = [self._nodes[self._bundle(rank)] for rank in range(self._layout.world_size)]
        addresses = {place: str(known[place]["NodeManagerAddress"]) for place in places}
        return [
            Neighbourhood(
                ranks=math.ceil(places.count(place) * processes / self._layout.world_size),
                cpus=int(known[place]["Resources"].get("CPU", 1)),
                peers=sorted(set(addresses.values()) - {addresses[place]}),
            )
            for place in places
        ]

    @property
    def nodes(self) -> Collection[str]:
        """Ray's ids of the machines."""
        return set(self._nodes.values())

    def has_machine_of(self, rank: int) -> bool:
        """Whether the machine of a rank is there, whatever Ray has noticed so far."""
        if dead_processes():  # nobody is there to ask
            return False
        place = self._nodes[self._bundle(rank)]
        node = next((node for node in ray.nodes() if node["NodeID"] == place), None)
        return node is not None and bool(node["Alive"]) and _answers(node)

    def refill(self) -> set[int]:
        """Waits until all ranks have room on machines that are there.

        Returns:
            The ranks that have their room on another machine than before.

        Raises:
            NodeLost: a machine is gone, or Ray itself is, and no other was found in time.
        """
        if dead := dead_processes():  # Ray's own look at it takes many seconds
            raise NodeLost(0, f"Ray's own processes have died: {', '.join(dead)}")
        wait = _node_wait()
        began = time.monotonic()
        ends = began + wait
        while True:
            held, alive = self._held(), {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
            there = {node for node in set(held.values()) & alive.keys() if _answers(alive[node])}
            gone = [bundle for bundle, node in sorted(held.items()) if node not in there]
            now = time.monotonic()
            if not gone:
                return self._move(held)
            if any(held[bundle] in alive for bundle in gone) and now < began + NOTICE_SECONDS:
                ends = max(ends, now + wait)  # Ray looks for another machine only after that
            if now >= ends:
                raise self._lost(gone[0], wait)
            time.sleep(0.5)

    def release(self) -> None:
        """Gives the room back."""
        remove_placement_group(self._group)

    def _bundle(self, rank: int) -> int:
        return self._bundles[rank // self._layout.tp]

    def _held(self) -> dict[int, str]:
        """The machine of each bundle, by its number; an empty name where it has none."""
        table = placement_group_table(self._group)
        nodes = {int(bundle): str(node) for bundle, node in table["bundles_to_node_id"].items()}
        return {bundle: nodes.get(bundle, "") for bundle in range(len(table["bundles"]))}

    def _move(self, held: Mapping[int, str]) -> set[int]:
        moved = {
            rank
            for rank in range(self._layout.world_size)
            if held[self._bundle(rank)] != self._nodes[self._bundle(rank)]
        }
        self._nodes = dict(held)
        return moved

    def _lost(self, bundle: int, waited: float) -> NodeLost:
        rank = self._bundles.index(bundle) * self._layout.tp
        node = self._nodes[bundle]
        return NodeLost(
            rank,
            f"its machine (Ray's node {node}) is gone, and there was no other for {waited:.0f} s",
            group=self._name,
        )


def bundle_sizes(groups: int, *, nodes: int | None) -> list[int]:
    """How many tensor-parallel groups each piece of room is for; a piece is on one machine.

    Args:
        groups: how many there are.
        nodes: machines that are to share them evenly; None puts each wherever it fits.
    """
    if nodes is None:
        return [1] * groups
    machines = min(nodes, groups)
    return [groups // machines + (machine < groups % machines) for machine in range(machines)]


def bundles_of_groups(sizes: Sequence[int], nodes: Mapping[int, str]) -> list[int]:
    """The bundle of each group, such that groups on one machine follow each other."""
    order: dict[str, list[int]] = {}
    for bundle, node in nodes.items():
        order.setdefault(node, []).append(bundle)
    return [
        bundle for bundles in order.values() for bundle in bundles for _ in range(sizes[bundle])
    ]


def _reserve(sizes: Sequence[int], *, gpu: bool, evenly: bool) -> PlacementGroup:
    bundles = [{"CPU": float(size)} | ({"GPU": float(size)} if gpu else {}) for size in sizes]
    group = placement_group(bundles, "STRICT_SPREAD" if evenly else "PACK")
    if not group.wait(PLACEMENT_SECONDS):
        remove_placement_group(group)
        raise NoRoom(
            f"the cluster found no room for {sum(sizes)} ranks in {PLACEMENT_SECONDS:.0f} s. "
            f"Wanted{', each on another machine' if evenly else ''}: {_counted(bundles)}. "
            f"There are: {_counted(_machines())}"
        )
    return group


def _machines() -> Iterator[dict[str, float]]:
    for node in ray.nodes():
        if node["Alive"]:
            yield {kind: node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU")}


def _counted(things: Collection[Mapping[str, float]] | Iterator[Mapping[str, float]]) -> str:
    texts = [", ".join(f"{count:g} {kind}" for kind, count in thing.items()) for thing in things]
    return "; ".join(f"{texts.count(text)} x ({text})" for text in sorted(set(texts))) or "none"


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether a machine's raylet is there."""
    address = (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
    try:
        with socket.create_connection(address, timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _node_wait() -> float:
    """Seconds to wait for another machine in the place of a lost one."""
    if own_cluster():
        return 0.0  # there is only this one
    return float(os.environ.get(driver_variables.NODE_WAIT_SECONDS, NODE_WAIT_SECONDS))
