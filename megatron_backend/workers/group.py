"""All ranks of a model as Ray actors, called together from one thread.

A job has one group for what it trains, and one more for each model that it only reads. A group does
not know what its ranks do: that is in the class of their worker.

Ranks talk to each other in collectives, so a call is made on all of them or none, and one that dies
takes the others with it: they wait for it in vain, or fail with an error of the network that says
nothing about the cause. Whoever died is the cause, so `call` reports a death before any error, and
gives Ray a moment to notice a death when an error comes first.

A call that is not answered within its phase's deadline means that ranks hang. Which of them is the
cause is asked of their heartbeats (`heartbeat`): one that does not even answer that is frozen; else
it is those that are at something of their own while the others wait for them.

After a failure the ranks that are of no use are replaced by new processes in the same places, and
the others are woken from whatever they wait in (`connections`) and keep what they have imported.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from megatron_backend import tracing
from megatron_backend.workers import connections
from megatron_backend.workers.actor import WATCH, RankActor, Worker
from megatron_backend.workers.deaths import death_of, is_network_error, oom_kills
from megatron_backend.workers.errors import ConnectionLost, RanksFailed
from megatron_backend.workers.hangs import BEAT_SECONDS, PHASE_OF, hang_of
from megatron_backend.workers.heartbeat import Beat
from megatron_backend.workers.killing import kill_on_node, kill_process
from megatron_backend.workers.machine import Place
from megatron_backend.workers.placement import Room
from megatron_backend.workers.ray_session import here
from service.spec import DeadlineSpec, JobContext
from service.spec.layout import Layout

log = logging.getLogger(__name__)

DEATH_NOTICE_SECONDS = 3.0
"""How long Ray may take to see that a process is gone."""
LEAVE_SECONDS = 10.0
"""How long a rank may take to come out of a call that was cut short."""


class WorkerGroup[W: Worker]:
    """The ranks of one model. Use inside `ray_session`.

    Attributes:
        name: of the model in errors and logs; empty for the one that is trained.
        layout: of the ranks.
        joined: the model is on the ranks, after `setup`.
        pids: process id of each rank, on its own machine.
        addresses: of each rank's machine, after `setup`.
        own_seconds: of each rank, in the last call: how long it was at something of its own.
    """

    def __init__(
        self,
        worker: type[W],
        layout: Layout,
        *,
        gpu: bool,
        deadlines: DeadlineSpec,
        nodes: int = 1,
        processes: int = 0,
        name: str = "",
    ) -> None:
        """Starts the processes, which import Megatron while the caller goes on.

        Args:
            worker: the class of what a rank does.
            layout: of the model; one process a rank.
            gpu: one GPU for each rank.
            deadlines: how long calls may take.
            nodes: machines of the job.
            processes: ranks of all models of the job, where there are more than this one's.
            name: see above.

        Raises:
            NoRoom: the cluster has no place for the ranks.
        """
        self.name, self.layout = name, layout
        self.pids = [0] * layout.world_size
        self.addresses = [""] * layout.world_size
        self.own_seconds = [0.0] * layout.world_size
        self.gpu: str | None = None
        self._worker, self._gpu, self._deadlines = worker, gpu, deadlines
        self._processes = max(processes, layout.world_size)
        self._nodes = [""] * layout.world_size
        self._here = here()
        self._unanswered: dict[ray.ObjectRef, int] = {}
        self._oom_kills = oom_kills()
        self._room = Room(layout, gpu=gpu, nodes=nodes, group=name)
        self._actors = [self._new_actor(rank) for rank in range(layout.world_size)]
        self._preparing, self.joined = self._prepare(), False

    def setup(self, context: JobContext, **options: Any) -> None:
        """Joins the ranks and builds the model on them.

        Args:
            context: the job.
            options: of the worker's own `setup`.

        Raises:
            RanksFailed: a rank died or hangs.
        """
        places: list[Place] = self._wait(self._preparing, "prepare")
        self._nodes = [place.node for place in places]
        self.pids = [place.pid for place in places]
        self.addresses = [place.address for place in places]
        self.gpu = places[0].gpu
        address = places[0].address
        if len({place.address for place in places}) == 1:
            address = "127.0.0.1"  # nobody outside this machine has to reach it
        packed = ((context, address, places[0].port), options)
        self.call_each(self._worker.setup, [packed] * self.layout.world_size)
        self.joined = True

    def call[**P, R](
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls a method on every rank, with the same arguments.

        Returns:
            What each rank answered, in order.

        Raises:
            RanksFailed: a rank died or hangs, or ranks lost each other.
            Exception: what a rank raised, as it was, with the rank in a note.
        """
        return self.call_each(method, [(args, kwargs)] * self.layout.world_size)

    def call_each[R](
        self,
        method: Callable[..., R],
        arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    ) -> list[R]:
        """As `call`, with each rank's own arguments."""
        name, trace = method.__name__, tracing.place()
        # What several ranks get is handed over once.
        stored = {id(packed): ray.put(packed) for packed in {id(p): p for p in arguments}.values()}
        pending = {
            actor.call.remote(name, stored[id(packed)], trace): rank
            for rank, (actor, packed) in enumerate(zip(self._actors, arguments, strict=True))
        }
        answers = self._wait(pending, name)
        self.own_seconds = [seconds for _, seconds in answers]
        return [result for result, _ in answers]

    @property
    def nodes(self) -> Collection[str]:
        """See `Room.nodes`."""
        return self._room.nodes

    def refill_room(self) -> set[int]:
        """See `Room.refill`."""
        return self._room.refill()

    def replace(self, ranks: Collection[int]) -> None:
        """Puts new processes in the place of some; `setup` joins all of them anew.

        The others leave what they are in. One that does not is replaced as well.
        """
        failed = set(ranks)
        self._kill(failed)
        failed |= self._wake(set(range(self.layout.world_size)) - failed)
        living = set(range(self.layout.world_size)) - failed
        leaving = {self._actors[rank].call.remote("shutdown", ((), {})): rank for rank in living}
        failed |= self._unfinished(leaving)
        of = f"of the {self.name} " if self.name else ""
        log.info("ranks %s %sare replaced, the others stay", sorted(failed), of)
        self._kill(failed - set(ranks))
        for rank in failed:
            self._actors[rank] = self._new_actor(rank)
        self._unanswered = {}
        self._oom_kills = oom_kills()
        self._preparing, self.joined = self._prepare(), False

    def flush_spans(self) -> list[ray.ObjectRef]:
        """Has the ranks send the spans that they have not sent; an answer of each."""
        return [actor.flush_spans.remote() for actor in self._actors]

    def stop(self) -> None:
        """Ends all ranks at once."""
        self._kill(range(self.layout.world_size))
        self._room.release()

    def _new_actor(self, rank: int) -> Any:
        return (
            ray.remote(concurrency_groups=WATCH)(RankActor)
            .options(
                num_cpus=1,
                num_gpus=1 if self._gpu else 0,
                max_restarts=0,
                scheduling_strategy=self._room.strategy(rank),
            )
            .remote(self._worker, rank, self.layout, self.name)
        )

    def _prepare(self) -> dict[ray.ObjectRef, int]:
        around = self._room.neighbourhoods(self._processes)
        return {actor.prepare.remote(around[rank]): rank for rank, actor in enumerate(self._actors)}

    def _wait(self, pending: dict[ray.ObjectRef, int], method: str) -> list[Any]:
        """What all ranks answer, in order; see `call`."""
        self._unanswered = pending
        results: list[Any] = [None] * len(pending)
        limit: float = getattr(self._deadlines, PHASE_OF[method])
        deadline = time.monotonic() + limit
        while pending:
            left = max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(pending), num_returns=1, timeout=left)
            if not done:
                silent = sorted(pending.values())
                raise hang_of(silent, self._beats(silent), method, limit, group=self.name)
            rank = pending.pop(done[0])
            try:
                results[rank] = ray.get(done[0])
            except RayTaskError as error:
                self._blame(rank, error, pending)
            except RayError as error:
                raise self._death(rank, error) from error
        return results

    def _blame(self, rank: int, error: RayTaskError, others: dict[ray.ObjectRef, int]) -> NoReturn:
        """Raises the death of another rank, where there is one, else the error of this rank."""
        deadline = time.monotonic() + DEATH_NOTICE_SECONDS
        while others:
            left = max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(others), num_returns=1, timeout=left)
            if not done:
                break
            other = others.pop(done[0])
            try:
                ray.get(done[0])
            except RayTaskError:
                continue  # an error like this rank's own
            except RayError as death:
                raise self._death(other, death) from death
        cause = error.cause
        if is_network_error(cause):
            message = f"rank {rank} lost the others: {cause}"
            raise ConnectionLost((), message, group=self.name) from cause
        place = f"the {self.name}'s rank {rank}" if self.name else f"rank {rank}"
        cause.add_note(f"on {place}:\n{error}")  # the traceback there
        raise cause from None

    def _death(self, rank: int, error: RayError) -> RanksFailed:
        oom_killed = self._nodes[rank] == self._here and oom_kills() > self._oom_kills
        return death_of(
            rank,
            error,
            oom_killed=oom_killed,
            machine_there=lambda: self._room.has_machine_of(rank),
            group=self.name,
        )

    def _beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        return self._answers({self._actors[rank].beat.remote(): rank for rank in ranks})

    def _answers(self, asked: Mapping[ray.ObjectRef, int]) -> dict[int, Any]:
        """What those ranks answer that do so in time."""
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=BEAT_SECONDS)
        answers = {}
        for reference in done:
            with suppress(RayError):
                answers[asked[reference]] = ray.get(reference)
        return answers

    def _wake(self, ranks: Collection[int]) -> set[int]:
        """Has living ranks come out of the calls that they are in; those that do not."""
        stuck = {call: rank for call, rank in self._unanswered.items() if rank in ranks}
        if not stuck:
            return set()
        asked = {self._actors[rank].connections.remote(): rank for rank in ranks}
        chosen = connections.between(self._answers(asked))
        self._answers({self._actors[rank].hang_up.remote(chosen[rank]): rank for rank in chosen})
        return self._unfinished(stuck)

    def _unfinished(self, calls: Mapping[ray.ObjectRef, int]) -> set[int]:
        """Ranks that do not come out of a call in time, or only by dying."""
        if not calls:
            return set()
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=LEAVE_SECONDS)
        failed = {calls[call] for call in late}
        for call in done:
            try:
                ray.get(call)
            except RayTaskError:
                continue  # it failed, and lives
            except RayError:
                failed.add(calls[call])
        return failed

    def _kill(self, ranks: Collection[int]) -> None:
        silent, asked = set(self._unanswered.values()), []
        for rank in ranks:
            ray.kill(self._actors[rank])
            # Ray asks the process first, and one that is frozen does not hear it.
            if self.pids[rank] and self._nodes[rank] == self._here:
                kill_process(self.pids[rank])
            elif self.pids[rank] and rank in silent:
                asked.append(kill_on_node(self._nodes[rank], self.pids[rank]))
            self.pids[rank] = 0
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=BEAT_SECONDS)
