"""A whole DPO job: what the reference said in one attempt is there for the next."""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.megatron_backend.driver import tiny_job, value_jobs

pytestmark = pytest.mark.long

TRAINING = {"epochs": 2, "global_batch_size": 6, "max_length": 16}


def _run(folder: Path, attempt: int) -> list[float]:
    """The losses of an attempt, to its end."""
    assert tiny_job.start(folder, attempt).wait(600) == 0, tiny_job.log_text(folder, attempt)
    return [event.data["loss"] for event in tiny_job.events(folder, attempt, kind="metrics")]


def test_a_second_attempt_computes_no_log_probs_of_the_reference(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    tiny_job.write_job(
        folder, algorithm={"type": "dpo"}, training=TRAINING, checkpoint={"export": False}
    )
    # One JSON array, as LLaMA-Factory's files are.
    rows = [value_jobs.preference(index) for index in range(tiny_job.ROWS)]
    (folder / "rows.jsonl").write_text(json.dumps(rows))
    losses = _run(folder, 1)
    assert len(losses) == 8  # 24 pairs twice, 6 a step
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are one
    assert losses[-1] < 0.6
    (kept,) = (folder / "reference").iterdir()
    # Of each pair a head, a value for each trained token of the first epoch, and a digest.
    steps = tiny_job.events(folder, kind="metrics")[:4]
    values = sum(event.data["tokens"] for event in steps)
    assert kept.stat().st_size == tiny_job.ROWS * (12 + 16) + 4 * values

    shutil.rmtree(folder / "checkpoints")
    assert _run(folder, 2) == pytest.approx(losses, abs=1e-6)
    assert list((folder / "reference").iterdir()) == [kept]  # nothing was computed, so kept, anew
