"""Fixtures of the driver's tests."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_backend.driver.recorder import SpoolRecorder
from tests.megatron_backend.driver import tiny_job
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
def spool_recorder(tmp_path: Path) -> Iterator[SpoolRecorder]:
    """A real one, of the first attempt of the job that `open_saves` opens."""
    folder = tmp_path / "job"
    checkpoint = {"save_retries": 1, "keep_last": 1}
    tiny_job.write_job(folder, parallel={"tp": 2}, checkpoint=checkpoint)
    (folder / "attempts" / "1").mkdir(parents=True)
    recorder = SpoolRecorder(folder, job_id="job-1", attempt=1)
    yield recorder
    recorder.close()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A driver takes the signals of its process over; here they are put back."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
