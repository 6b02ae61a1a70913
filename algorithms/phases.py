"""Where a step's time goes, under names that stay the same.

Online: `rollout, reward, logprobs, advantage, update, sync`. Offline: `data, update`. Metrics carry
them as `seconds_<phase>`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Around = Callable[[str, int], AbstractContextManager[object]]
"""Makes what is entered around a part of the loop, given its name and the number of the step."""


def nothing_around(_name: str, _step: int) -> AbstractContextManager[object]:
    """For a loop that nobody watches."""
    return nullcontext()


class PhaseClock:
    """Adds up the wall time of each phase of one step; a phase may be entered many times."""

    def __init__(
        self,
        on_enter: Callable[[str], None] | None = None,
        around: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Nothing was timed yet.

        Args:
            on_enter: is told the name of each phase that begins.
            around: makes what is entered around each phase, given its name.
        """
        self._on_enter = on_enter
        self._around = around
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block it is wrapped around."""
        if self._on_enter is not None:
            self._on_enter(phase)
        start = time.perf_counter()
        try:
            with self._around(phase):
                yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

    def seconds(self) -> dict[str, float]:
        """`seconds_<phase>` of every phase that was entered."""
        return {f"seconds_{phase}": spent for phase, spent in self._seconds.items()}
