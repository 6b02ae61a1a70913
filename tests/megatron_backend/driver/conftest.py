"""Fixtures of the driver's tests."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_backend.driver.saves import Saves


@pytest.fixture
def open_saves(tmp_path: Path) -> Iterator[Callable[..., Saves]]:
    """Makes `Saves` of one job's folder."""
    made: list[Saves] = []

    def make(attempt: int = 1, **spec: Any) -> Saves:
        made.append(Saves(tmp_path / "job", attempt, **spec))
        return made[-1]

    yield make
    for each in made:
        each.group.close()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A driver takes the signals of its process over; here they are put back."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
