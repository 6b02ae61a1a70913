"""Ranks that are slower than the others.

A step takes as long as its slowest rank, and all others wait for it, so only the time in which a
rank is at something of its own tells who it is (`heartbeat`). On a GPU that time is the host's; a
slow card shows in it only where the host waits for its kernels.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

FACTOR = 2.0
"""A rank with this many times the median of all ranks' own time is a straggler in that step."""
LEAST_SECONDS = 0.2
"""... if that is more than the median by so much; below, it is noise of the measurement."""
IN_A_ROW = 8
"""After so many steps in a row it is told, and again after as many times so many."""


@dataclass(slots=True)
class Stragglers:
    """Counts, for each rank, the steps in a row in which it was one."""

    _rows: dict[int, int] = field(default_factory=dict)

    def see(self, own_seconds: Sequence[float]) -> list[str]:
        """Takes one step's own time of each rank; what is to be told, as messages."""
        usual = statistics.median_low(own_seconds)
        messages = []
        for rank, seconds in enumerate(own_seconds):
            slow = seconds > FACTOR * usual and seconds - usual > LEAST_SECONDS
            self._rows[rank] = row = self._rows.get(rank, 0) + 1 if slow else 0
            if row and _is_power_of(IN_A_ROW, row):
                messages.append(
                    f"rank {rank} is slower than the others for {row} steps in a row: in the last "
                    f"one it computed for {seconds:.2f} s, the median rank for {usual:.2f} s"
                )
        return messages


def _is_power_of(base: int, number: int) -> bool:
    while number % base == 0:
        number //= base
        if number == 1:
            return True
    return False
