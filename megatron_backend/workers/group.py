"""All ranks of a job as Ray actors, called together from one thread.

Ranks talk to each other in collectives, so a call is made on all of them or none, and one that dies
takes the others with it: they wait for it in vain, or fail with an error of the network that says
nothing about the cause. Whoever died is the cause, so `call` reports a death before any error, and
gives Ray a moment to notice a death when an error comes first.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_backend.workers.actor import RankActor
from megatron_backend.workers.errors import NoRoom, WorkerLost, WorkerOutOfMemory, WorkerPreempted
from service.spec import JobContext
from service.spec.layout import Layout

log = logging.getLogger(__name__)

PLACEMENT_SECONDS = 600.0
"""How long the cluster may take to find room for all ranks."""
DEATH_NOTICE_SECONDS = 3.0
"""How long Ray may take to see that a process is gone."""


class WorkerGroup:
    """The ranks of one job. Use inside `ray_session`.

    Attributes:
        layout: of the ranks.
        pids: process id of each rank, on its own machine.
    """

    def __init__(self, layout: Layout, *, gpu: bool) -> None:
        """Starts the processes, which import Megatron while the caller goes on.

        Args:
            layout: of training; one process a rank.
            gpu: one GPU for each rank.

        Raises:
            NoRoom: the cluster has no place for the ranks.
        """
        self.layout = layout
        self.pids: list[int] = []
        self._group = _reserve(layout, gpu=gpu)
        remote = ray.remote(RankActor)
        self._actors = [
            remote.options(
                num_cpus=1,
                num_gpus=1 if gpu else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=rank // layout.tp
                ),
            ).remote(rank, layout)
            for rank in range(layout.world_size)
        ]
        self._preparing = self._start("prepare", [((), {})] * layout.world_size)

    def setup(self, context: JobContext) -> None:
        """Joins the ranks and builds the model on them; see `RankWorker.setup`."""
        places = self._wait(self._preparing)
        self.pids = [pid for _, _, pid in places]
        address, port, _ = places[0]
        if all(other == address for other, _, _ in places):
            address = "127.0.0.1"  # nobody outside this machine has to reach it
        self.call("setup", context, address, port)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of `RankActor` on every rank, with the same arguments.

        Returns:
            What each rank answered, in order.

        Raises:
            WorkerLost: a rank's process died.
            Exception: what a rank raised, as it was, with the rank in a note.
        """
        return self.call_each(method, [(args, kwargs)] * self.layout.world_size)

    def call_each(
        self, method: str, arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> list[Any]:
        """As `call`, with each rank's own arguments."""
        return self._wait(self._start(method, arguments))

    def stop(self) -> None:
        """Ends all ranks at once."""
        for actor in self._actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)

    def _start(
        self, method: str, arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> dict[ray.ObjectRef, int]:
        # What several ranks get is handed over once.
        stored = {id(packed): ray.put(packed) for packed in {id(p): p for p in arguments}.values()}
        return {
            actor.call.remote(method, stored[id(packed)]): rank
            for rank, (actor, packed) in enumerate(zip(self._actors, arguments, strict=True))
        }

    def _wait(self, pending: dict[ray.ObjectRef, int]) -> list[Any]:
        results: list[Any] = [None] * len(pending)
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1)
            rank = pending.pop(done[0])
            try:
                results[rank] = ray.get(done[0])
            except RayTaskError as error:
                self._blame(rank, error, pending)
            except RayError as error:
                raise _lost(rank, error) from error
        return results

    def _blame(self, rank: int, error: RayTaskError, others: dict[ray.ObjectRef, int]) -> NoReturn:
        """Raises the death of another rank, where there is one, else the error of this rank."""
        done, _ = (
            ray.wait(list(others), num_returns=len(others), timeout=DEATH_NOTICE_SECONDS)
            if others
            else ([], [])
        )
        for reference in done:
            try:
                ray.get(reference)
            except RayTaskError:
                continue  # an error like this rank's own
            except RayError as death:
                raise _lost(others[reference], death) from death
        cause = error.cause
        cause.add_note(f"on rank {rank}:\n{error}")  # the traceback there
        raise cause from None


def _reserve(layout: Layout, *, gpu: bool) -> PlacementGroup:
    """Room for all ranks or none, with each tensor-parallel group inside one machine."""
    bundle = {"CPU": float(layout.tp)}
    if gpu:
        bundle["GPU"] = float(layout.tp)
    group = placement_group([dict(bundle) for _ in range(layout.world_size // layout.tp)], "PACK")
    if not group.wait(PLACEMENT_SECONDS):
        ray.util.remove_placement_group(group)
        raise NoRoom(
            f"the cluster found no room for {layout.world_size} ranks ({bundle} on one machine, "
            f"{layout.world_size // layout.tp} times) in {PLACEMENT_SECONDS:.0f} s"
        )
    return group


def _lost(rank: int, error: RayError) -> WorkerLost:
    text = str(error)
    if isinstance(error, OutOfMemoryError) or "memory on the node" in text:
        return WorkerOutOfMemory(rank, text)
    if isinstance(error, RayActorError) and error.preempted:
        return WorkerPreempted(rank, text)
    return WorkerLost(rank, text)
