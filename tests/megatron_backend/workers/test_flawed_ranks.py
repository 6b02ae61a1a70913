"""A real job whose ranks give no number, and of which one is slow: real Ray, real Megatron."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from service.spec import Reason
from tests.megatron_backend.driver import tiny_job
from tests.megatron_backend.workers import flawed_algorithm

pytestmark = pytest.mark.long

STEPS, EVERY, WRONG = 9, 3, 5
SPEC: dict[str, Any] = {
    "parallel": {"dp": 2},
    "checkpoint": {"every_steps": EVERY, "keep_last": 1, "export": False},
    "training": {"steps": STEPS, "global_batch_size": 6, "max_length": 16},
}


def run(folder: Path, policy: str, **flaws: Any) -> Path:
    """The job, after it ended."""
    tiny_job.write_job(folder, **SPEC, faults={"on_nan": policy})
    path = folder / "context.json"
    document = json.loads(path.read_text())
    document["spec"]["algorithm"] = {"type": "flawed", **flaws}
    path.write_text(json.dumps(document))
    environment = flawed_algorithm.environment(folder / "packages")
    tiny_job.start(folder, environment=environment).wait(240)
    return folder


def steps(folder: Path) -> list[dict[str, Any]]:
    """What the record says of each step, without times."""
    return [
        {"step": event.step}
        | {k: v for k, v in event.data.items() if "seconds" not in k and "per_second" not in k}
        for event in tiny_job.events(folder, kind="metrics")
    ]


def test_ranks_go_back_in_place_and_end_where_a_calm_job_does(tmp_path: Path) -> None:
    """One job has a NaN that passes (the second loss; the third is its second run) and one that
    stays (losses 6 and 7, of step 5, and 8, of each half alone), goes back from it, and has a rank
    that is slow all the time. The other one is calm, and leaves step 5 out."""
    sick = run(tmp_path / "sick", "rewind", no_number=[2, 6, 7, 8], slow_seconds=0.4)
    calm = run(tmp_path / "calm", "skip", no_number=[5, 6, 7])
    for job in (sick, calm):
        assert tiny_job.outcome(job).status == "succeeded", tiny_job.log_text(job)

    warnings = {event.step: event.data for event in tiny_job.events(sick, kind="warning")}
    slow = warnings.pop(None)["message"]
    assert slow.startswith("rank 1 is slower than the others for 8 steps in a row: ")
    assert {step: data["transient"] for step, data in warnings.items()} == {2: True, WRONG: False}
    assert f"the job goes back to step {EVERY} " in warnings[WRONG]["message"]
    (left_out,) = tiny_job.events(calm, kind="warning")
    assert "it is left out" in left_out.data["message"]
    assert [row["step"] for row in steps(sick)] == list(range(1, STEPS + 1))
    assert steps(sick) == steps(calm)
    saved = tiny_job.checkpoint_files(calm, STEPS)
    assert any(name.endswith(".distcp") for name in saved)
    assert tiny_job.checkpoint_files(sick, STEPS) == saved


def test_a_broken_rank_is_named_and_ends_the_job(tmp_path: Path) -> None:
    """Whatever the policy: it is not the rows that are to blame."""
    outcome = tiny_job.outcome(run(tmp_path / "broken", "skip", broken=True))
    assert outcome.reason is Reason.NODE_FAILURE
    assert re.search(r"computed by rank 1 \([0-9.]+\) alone is wrong", outcome.message)
    assert not tiny_job.events(tmp_path / "broken", kind="metrics")
