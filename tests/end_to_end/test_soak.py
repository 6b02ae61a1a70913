"""Jobs that are killed again and again end as one that is left in peace.

`kill -9` of a random rank, the driver or the raylet, in the middle of saves and at random moments,
while they train and recover. One job writes its checkpoints while training waits, one in the
background; each takes half of the kills. PLANISH_SOAK_KILLS (4) says how many there are and
PLANISH_SOAK_SEED (1) with which random numbers.
"""

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_backend.checkpoint import manifest
from service.api.resources import MetricsRow
from service.client import Client
from service.spec import WorkerEvent
from tests.end_to_end.conftest import ROWS_A_STEP, sft_job
from tests.end_to_end.job_processes import processes
from tests.end_to_end.service_process import ServiceProcess

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("PLANISH_SOAK_KILLS", "4"))
SEED = int(os.environ.get("PLANISH_SOAK_SEED", "1"))
SHARES = ((KILLS + 1) // 2, KILLS // 2)
"""Kills of the job that waits for its saves, and of the one that saves in the background."""
STEPS = 60 + 40 * SHARES[0]
SAVED_EVERY, KEPT_EVERY, KEPT_LAST = 5, 20, 2
KINDS = ("driver", "rank", "rank", "raylet")
"""What is killed first, whatever the seed; the second job begins in the middle of them."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One process of a job that was killed, and whether a save was on its way."""

    target: str
    in_save: bool


def kept(published: Iterable[int]) -> set[int]:
    """The steps that may not be gone, of all that were ever published."""
    steps = sorted(published)
    return {step for step in steps if step % KEPT_EVERY == 0} | set(steps[-KEPT_LAST:])


class Watch:
    """Looks at a job's folder between kills; what was published may never be lost or torn."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._root = folder, folder / "checkpoints"
        self._seen: dict[int, manifest.Manifest] = {}
        self._left_behind: set[Path] = set()
        self.latest = -1

    def check(self) -> None:
        """Every checkpoint is whole and as it was; none is gone but those that may go.

        The job goes on meanwhile: what is gone from one list must be older than what is in that
        one or in a list made after it.
        """
        latest, told = self._latest(), self._told()
        assert latest >= self.latest
        self.latest = latest
        known = self._seen.keys() | told | ({latest} - {-1})
        there = self._published()
        lost = (kept(known | there | self._published()) & known) - there
        assert not lost, f"{sorted(lost)} are lost, {sorted(there)} are there"
        assert not list(self._root.glob(".corrupt-*"))
        for step in there:
            folder = self._root / f"step-{step:08d}"
            try:
                found = manifest.verify(folder)
            except (manifest.CorruptCheckpoint, FileNotFoundError):
                if folder.exists():
                    raise
                continue  # it went while it was read; the next look tells whether it might
            assert found.step == step
            assert self._seen.setdefault(step, found) == found

    def check_end(self) -> None:
        """Once the job has ended: nothing but what stays, and all of that."""
        self.check()
        assert self.latest == STEPS
        assert self._published() == kept(range(SAVED_EVERY, STEPS + 1, SAVED_EVERY))

    def steps(self) -> int:
        """How many steps were recorded, over all attempts; it grows when the job gets on."""
        return sum(log.count(b'"kind":"metrics"') for log in self._logs())

    def saves(self) -> set[Path]:
        """Checkpoints that are being written; not what a kill has left behind of one."""
        return set(self._root.glob(".tmp-*")) - self._left_behind

    def fell_into(self, saves: set[Path]) -> bool:
        """Whether one of these is still being written, right after a kill."""
        still = set(self._root.glob(".tmp-*"))
        self._left_behind |= still
        return bool(saves & still)

    def _latest(self) -> int:
        pointer = self._root / "latest"
        return int(pointer.read_text().removeprefix("step-")) if pointer.exists() else -1

    def _published(self) -> set[int]:
        return {int(path.name.removeprefix("step-")) for path in self._root.glob("step-*")}

    def _told(self) -> set[int]:
        """The steps whose checkpoint an event has announced."""
        lines = [line for log in self._logs() for line in log.split(b"\n")[:-1]]
        events = map(WorkerEvent.model_validate_json, (x for x in lines if b'"checkpoint"' in x))
        return {int(event.data["step"]) for event in events if event.kind == "checkpoint"}

    def _logs(self) -> list[bytes]:
        return [log.read_bytes() for log in self._folder.glob("attempts/*/events.jsonl")]


def until(
    condition: Callable[[], object],
    ended: Callable[[], bool],
    seconds: float,
    pause: float = 0.02,
) -> bool:
    """Returns once it holds (True), the job has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while not ended() and time.monotonic() < deadline:
        for _ in range(int(1 / pause)):
            if condition():
                return True
            time.sleep(pause)
    return False


def strike(
    job: str, target: str, watch: Watch, draw: random.Random, ended: Callable[[], bool], aim: bool
) -> Kill | None:
    """Kills one process of the job; None where it found none, or no save to kill it in."""
    if not aim:
        time.sleep(draw.uniform(0, 1.0))
    victims = processes(job, target)
    if not victims:
        time.sleep(0.1)  # it is between two attempts
        return None
    victim = draw.choice(victims)
    # A save takes some milliseconds. Where none comes the victim may be of an attempt that is over.
    if aim and not until(watch.saves, ended, 2, pause=0.001):
        return None
    saves = watch.saves()
    try:
        if victim.status() == psutil.STATUS_ZOMBIE:
            return None
        victim.kill()
    except psutil.NoSuchProcess:
        return None
    return Kill(target, watch.fell_into(saves))


def torment(
    client: Client, job: str, watch: Watch, targets: Sequence[str], draw: random.Random
) -> list[Kill]:
    """Kills these one after the other, every second one in the middle of a save; what it did."""
    killed: list[Kill] = []

    def ended() -> bool:
        return client.job(job).state.value in ("SUCCEEDED", "FAILED", "CANCELLED")

    until(lambda: watch.steps() > 0, ended, 240)
    while len(killed) < len(targets) and not ended():
        kill = strike(job, targets[len(killed)], watch, draw, ended, aim=len(killed) % 2 == 0)
        if kill is None:
            continue
        killed.append(kill)
        watch.check()
        if draw.random() < 0.8:  # else the next one comes while it recovers
            steps = watch.steps()
            until(lambda: watch.steps() > steps, ended, 240)  # noqa: B023
            watch.check()
    return killed


def finish(client: Client, job: str) -> list[MetricsRow]:
    """Waits for a job's good end; the metrics of its steps."""
    for _ in client.events(job):
        pass  # to the end
    ended = client.job(job)
    assert ended.state.value == "SUCCEEDED", (ended.reason, ended.message)
    return client.metrics(job)


def last_checkpoint(service: ServiceProcess, job: str) -> dict[str, str]:
    """SHA-256 of every file: weights, moments, random numbers, place in the data."""
    folder = service.data_dir / "jobs" / job / "checkpoints" / f"step-{STEPS:08d}"
    return {name: entry.sha256 for name, entry in manifest.verify(folder).files.items()}


@pytest.mark.timeout(2400)
def test_jobs_that_are_killed_again_and_again_end_like_a_calm_one(
    service: ServiceProcess, model_root: Path, rows: Path
) -> None:
    """PLANISH_SOAK_KILLS says how often they are killed."""
    draw = random.Random(SEED)
    targets = (*KINDS, *(draw.choice(KINDS) for _ in range(KILLS)))
    with service.client() as client:
        file = client.upload(rows)

        def submit(name: str, **checkpoint: Any) -> str:
            saves = {"every_steps": SAVED_EVERY, "keep_every": KEPT_EVERY, "keep_last": KEPT_LAST}
            document = sft_job(
                model_root,
                file.id,
                name=name,
                parallel={"dp": 2},
                training={"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
                checkpoint={**saves, "export": False, **checkpoint},
                faults={"restarts": 1000},
                retry={"infrastructure": 100},
            )
            return client.submit(document).id

        calm_job = submit("calm")
        calm = finish(client, calm_job)
        for share, background in zip(SHARES, (False, True), strict=True):
            job = submit("background" if background else "waiting", async_save=background)
            watch = Watch(service.data_dir / "jobs" / job)
            mine, targets = targets[:share], targets[share:]
            killed = torment(client, job, watch, mine, draw)
            sick = finish(client, job)
            watch.check_end()
            attempts = len(client.job(job).attempts)
            print(f"seed {SEED}, background {background}, {attempts} attempts: {killed}")  # noqa: T201
            assert len(killed) == share
            assert any(kill.in_save for kill in killed) or not share
            assert [row.step for row in sick] == list(range(1, STEPS + 1))
            spans = [(row.values["data_start"], row.values["data_end"]) for row in sick]
            assert spans == [(ROWS_A_STEP * s, ROWS_A_STEP * (s + 1)) for s in range(STEPS)]
            for name in ("loss", "gradient_norm", "learning_rate", "tokens", "entropy"):
                assert [row.values[name] for row in sick] == [row.values[name] for row in calm]
            assert last_checkpoint(service, job) == last_checkpoint(service, calm_job)
