"""How the driver learns that there are no ranks, or that some are of no use any more."""

from collections.abc import Sequence


class NoRoom(Exception):
    """The cluster has no place for the ranks."""


class RayUnavailable(Exception):
    """Ray did not start, or could not be reached."""


class RanksFailed(Exception):
    """Ranks cannot go on, through no fault of what they were asked.

    Attributes:
        ranks: those that are to be replaced; the others live.
        group: name of the `WorkerGroup` that they are in; empty for the ranks of training.
        restartable: new processes in the same place may do better.
    """

    restartable = True

    def __init__(self, ranks: Sequence[int], message: str, *, group: str = "") -> None:
        super().__init__(f"the {group}'s {message}" if group else message)
        self.ranks, self.group = tuple(ranks), group


class WorkerLost(RanksFailed):
    """A rank's process died; the others cannot go on without it.

    Attributes:
        rank: its number.
    """

    def __init__(self, rank: int, message: str, *, group: str = "") -> None:
        super().__init__((rank,), f"rank {rank} died: {message}", group=group)
        self.rank = rank


class WorkerOutOfMemory(WorkerLost):
    """A rank's process was killed because its machine ran out of memory."""

    restartable = False


class WorkerPreempted(WorkerLost):
    """The cluster took a rank's machine back."""

    restartable = False


class NodeLost(WorkerLost):
    """A rank's machine is gone. New processes need another one, see `placement.Room.refill`."""


class RanksHung(RanksFailed):
    """Ranks did not answer within their deadline."""


class ConnectionLost(RanksFailed):
    """Ranks live, but lost each other."""
