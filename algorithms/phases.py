"""Where a step's time goes, under names that stay the same.

Online: `rollout, reward, logprobs, advantage, update, sync`. Offline: `data, update`. Metrics carry
them as `seconds_<phase>`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up the wall time of each phase of one step; a phase may be entered many times."""

    def __init__(self, on_enter: Callable[[str], None] | None = None) -> None:
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block it is wrapped around."""
        if self._on_enter is not None:
            self._on_enter(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

    def seconds(self) -> dict[str, float]:
        """`seconds_<phase>` of every phase that was entered."""
        return {f"seconds_{phase}": spent for phase, spent in self._seconds.items()}
