"""A thread tells what another one is doing: at work, or waiting for other ranks."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from megatron_backend.workers.heartbeat import Beat, Heartbeat


def beat_in(work: Callable[[], object], done: threading.Event) -> tuple[Beat, float, float]:
    """A beat in the midst of a call, and the call's own and whole seconds."""
    heartbeat = Heartbeat()
    seconds: list[float] = []

    def call() -> None:
        with heartbeat.watching("train_step") as watched:
            work()
        seconds.extend((watched.own_seconds, watched.seconds))

    assert heartbeat.beat() == Beat(method=None, seconds=0.0, waiting=False, place="")
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        while heartbeat.beat().seconds < 0.5:
            time.sleep(0.01)
        beat = heartbeat.beat()
    finally:
        done.set()
        thread.join()
    assert heartbeat.beat().method is None
    return beat, *seconds


def spin(done: threading.Event) -> None:
    while not done.is_set():
        time.sleep(0.001)


def test_a_rank_at_work() -> None:
    done = threading.Event()
    beat, own, whole = beat_in(lambda: spin(done), done)
    assert (beat.method, beat.waiting) == ("train_step", False)
    assert "in spin" in beat.place
    assert "is at work" in str(beat)
    assert own > 0.8 * whole > 0.4


def test_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    """A real collective over gloo, which a second rank, a thread here, joins when it is told to."""
    done = threading.Event()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)

    def late() -> None:
        group = torch.distributed.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))
        done.wait()
        group.allreduce([torch.ones(1)]).wait()

    other = threading.Thread(target=late, daemon=True)
    other.start()
    group = torch.distributed.ProcessGroupGloo(store, 0, 2, timedelta(seconds=60))
    beat, own, whole = beat_in(lambda: group.allreduce([torch.ones(1)]).wait(), done)
    other.join()
    assert beat.waiting
    assert "waits for other ranks" in str(beat)
    assert own < 0.5 * whole
