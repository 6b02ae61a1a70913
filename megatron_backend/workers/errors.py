"""How the driver learns that there are no ranks, or one fewer."""


class NoRoom(Exception):
    """The cluster has no place for the ranks."""


class RayUnavailable(Exception):
    """Ray did not start, or could not be reached."""


class WorkerLost(Exception):
    """A rank's process died; the others cannot go on without it.

    Attributes:
        rank: its number.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} died: {message}")
        self.rank = rank


class WorkerOutOfMemory(WorkerLost):
    """A rank's process was killed because its machine ran out of memory."""


class WorkerPreempted(WorkerLost):
    """The cluster took a rank's machine back."""
