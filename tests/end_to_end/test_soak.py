"""A job that is killed again and again ends as one that is left in peace.

`kill -9` of a random rank, the driver or the raylet, at random moments, while it trains, saves and
recovers. PLANISH_SOAK_KILLS (4) says how often and PLANISH_SOAK_SEED (1) with which random numbers.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_backend.checkpoint import manifest
from service.api.resources import MetricsRow
from service.client import Client
from tests.end_to_end.conftest import ROWS_A_STEP, sft_job
from tests.end_to_end.job_processes import processes
from tests.end_to_end.service_process import ServiceProcess

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("PLANISH_SOAK_KILLS", "4"))
SEED = int(os.environ.get("PLANISH_SOAK_SEED", "1"))
STEPS = 100 + 40 * KILLS
FIRST = ("rank", "raylet", "rank", "driver")
"""Each kind once, whatever the seed; what comes after is drawn."""


class Watch:
    """Looks at a job's folder between kills; what was published may never be lost or torn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.latest = -1

    def check(self) -> None:
        """The newest checkpoint is whole, and none that was seen before is gone for an older."""
        pointer = self._folder / "checkpoints" / "latest"
        if not pointer.exists():
            assert self.latest == -1
            return
        for _ in range(3):  # it may be retired, for newer ones, while it is being read
            name = pointer.read_text().strip()
            try:
                found = manifest.verify(pointer.with_name(name))
                break
            except manifest.CorruptCheckpoint:
                if pointer.read_text().strip() == name:
                    raise
        assert found.step >= self.latest
        self.latest = found.step

    def steps(self) -> int:
        """How many steps were recorded, and attempts begun; it grows when the job gets on."""
        logs = self._folder.glob("attempts/*/events.jsonl")
        return sum(log.read_bytes().count(b'"kind":"metrics"') for log in logs)

    def saving(self) -> bool:
        """A checkpoint is being written."""
        return any((self._folder / "checkpoints").glob(".tmp-*"))


def until(condition: Callable[[], bool], ended: Callable[[], bool], seconds: float) -> None:
    """Returns once it holds, the job has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while not ended() and time.monotonic() < deadline:
        for _ in range(50):
            if condition():
                return
            time.sleep(0.02)


def torment(client: Client, job: str, watch: Watch, draw: random.Random) -> list[str]:
    """Kills what it finds of the job, `KILLS` times; what it killed."""
    killed: list[str] = []

    def ended() -> bool:
        return client.job(job).state.value in ("SUCCEEDED", "FAILED", "CANCELLED")

    until(lambda: watch.steps() > 0, ended, 240)
    while len(killed) < KILLS and not ended():
        if draw.random() < 0.3:
            until(watch.saving, ended, 5)
        else:
            time.sleep(draw.uniform(0, 1.0))
        target = FIRST[len(killed)] if len(killed) < len(FIRST) else draw.choice(FIRST)
        victims = processes(job, target)
        if not victims:
            time.sleep(0.1)  # it is between two attempts
            continue
        victim = draw.choice(victims)
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed.append(target)
        watch.check()
        if draw.random() < 0.8:  # else the next one comes while it recovers
            steps = watch.steps()
            until(lambda: watch.steps() > steps, ended, 240)  # noqa: B023
            watch.check()
    return killed


def run(service: ServiceProcess, client: Client, document: object, kill: bool) -> list[MetricsRow]:
    """Runs a job to its end; the metrics of its steps."""
    job = client.submit(document)
    if kill:
        watch = Watch(service.data_dir / "jobs" / job.id)
        killed = torment(client, job.id, watch, random.Random(SEED))
    for _ in client.events(job.id):
        pass  # to the end
    ended = client.job(job.id)
    assert ended.state.value == "SUCCEEDED", (ended.reason, ended.message)
    if kill:
        watch.check()
        assert watch.latest == STEPS
        print(f"seed {SEED}, killed: {killed}, attempts: {len(ended.attempts)}")  # noqa: T201
        assert len(killed) == KILLS
    return client.metrics(job.id)


@pytest.mark.timeout(2400)
def test_a_job_that_is_killed_again_and_again_ends_like_a_calm_one(
    service: ServiceProcess, model_root: Path, rows: Path
) -> None:
    """PLANISH_SOAK_KILLS says how often it is killed."""
    plan = {
        "parallel": {"dp": 2},
        "training": {"steps": STEPS, "global_batch_size": ROWS_A_STEP, "max_length": 64},
        "checkpoint": {"every_steps": 5, "export": False},
        "faults": {"restarts": 1000},
        "retry": {"infrastructure": 100},
    }
    with service.client() as client:
        file = client.upload(rows)
        calm = run(service, client, sft_job(model_root, file.id, name="calm", **plan), False)
        sick = run(service, client, sft_job(model_root, file.id, name="sick", **plan), True)
    assert [row.step for row in sick] == list(range(1, STEPS + 1))
    spans = [(row.values["data_start"], row.values["data_end"]) for row in sick]
    assert spans == [(ROWS_A_STEP * s, ROWS_A_STEP * (s + 1)) for s in range(STEPS)]
    for name in ("loss", "gradient_norm", "learning_rate", "tokens", "entropy"):
        assert [row.values[name] for row in sick] == [row.values[name] for row in calm]
