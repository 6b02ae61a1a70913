"""What an attempt goes on from, and what it reads of other jobs, is verified before ranks start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from algorithms.errors import JobFailure
from megatron_backend.checkpoint.fence import Fence
from megatron_backend.driver.job import open_job
from megatron_backend.driver.start import Start, open_start
from service.spec import Reason
from tests.megatron_backend.driver import tiny_job
from tests.megatron_backend.driver.saves import Saves

PART = "state/__1_0.distcp"
PPO = {"type": "ppo", "value_model": {"source": {"from": "job:job-1@7"}}}
DISTILLATION = {"type": "distillation", "teacher_model": {"source": {"from": "job:job-1@7"}}}
ONLINE = {
    "data": None,
    "environment": {"id": "reasoning_gym/chain_sum"},
    "training": {"steps": 9, "global_batch_size": 8, "max_length": 16},
}
REWARD = {"model": {"source": {"from": "job:job-1@7"}}}
FIELDS = {
    "model": ("model", "model.from"),
    "critic": ("critic", "algorithm.value_model.source.from"),
    "teacher": ("teacher", "algorithm.teacher_model.source.from"),
    "reward": ("reward model", "reward.model.source.from"),
}


@pytest.fixture
def checkpoint(open_saves: Callable[..., Saves]) -> Path:
    """One that another job has published."""
    saves = open_saves()
    saves.save(7)
    return saves.root / "step-00000007"


def flip(path: Path) -> None:
    """One bit of a file, which keeps its size."""
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)


def change(folder: Path, **parts: Any) -> Path:
    path = folder / "context.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def using(folder: Path, role: str, checkpoint: Path, **spec: Any) -> Path:
    """A job that has one model from the checkpoint, as the service resolves `from`."""
    if role == "model":
        tiny_job.write_job(folder, **spec)
        tiny_job.start_from_checkpoint(folder, checkpoint)
        return folder
    algorithms = {"critic": PPO, "teacher": DISTILLATION, "reward": {"type": "grpo"}}
    spec |= {"reward": REWARD} if role == "reward" else {}
    tiny_job.write_job(folder, **ONLINE, algorithm=algorithms[role], **spec)
    own = json.loads((folder / "context.json").read_text())["model"]
    other = own | {"kind": "checkpoint", "weights": str(checkpoint)}
    return change(folder, job_id="job-2", other_models={role: other})


def start(folder: Path, attempt: int = 1) -> Start:
    """As the driver does, before it starts ranks; nothing may be damaged of the job's own."""
    fence = Fence(folder, attempt)
    fence.take()
    return open_start(open_job(folder, attempt), fence, pytest.fail)


@pytest.mark.parametrize("role", FIELDS)
def test_one_flipped_bit_of_a_model_from_another_job(
    checkpoint: Path, tmp_path: Path, role: str
) -> None:
    folder = using(tmp_path / "next", role, checkpoint)
    assert start(folder).newest is None
    flip(checkpoint / PART)
    with pytest.raises(JobFailure) as failure:
        start(folder)
    name, field = FIELDS[role]
    assert failure.value.reason is Reason.USER_ERROR
    assert str(failure.value) == (
        f"the checkpoint {checkpoint}, which the {name} comes from, is damaged: "
        f"{checkpoint.name}/{PART} does not have its manifest's SHA-256. Submit the job again with "
        f"another checkpoint in `{field}`"
    )


def test_a_model_from_a_checkpoint_that_is_gone(checkpoint: Path, tmp_path: Path) -> None:
    folder = using(tmp_path / "next", "teacher", checkpoint)
    checkpoint.rename(checkpoint.with_name(".trash"))
    with pytest.raises(JobFailure, match=r"the teacher comes from, is gone: its job has deleted"):
        start(folder)


@pytest.mark.parametrize(
    ("role", "algorithm", "read"),
    [
        ("model", {"type": "sft"}, False),
        ("model", {"type": "grpo", "kl_coef": 0.1}, True),  # its reference
        ("critic", PPO, False),
        ("teacher", DISTILLATION, True),
    ],
)
def test_a_later_attempt_verifies_what_it_still_reads(
    checkpoint: Path, tmp_path: Path, role: str, algorithm: dict[str, Any], read: bool
) -> None:
    """Where the job has a checkpoint of its own, the other's is often deleted by then."""
    spec = {"algorithm": algorithm} if role == "model" else {}
    if algorithm["type"] == "grpo":
        spec |= ONLINE
    folder = using(tmp_path / "next", role, checkpoint, **spec, parallel={"tp": 2})
    Saves(folder).save(1)
    assert start(folder, 2).newest is not None
    flip(checkpoint / PART)
    if not read:
        assert start(folder, 3).newest is not None
        return
    with pytest.raises(JobFailure, match=f"{PART} does not have"):
        start(folder, 3)


def test_a_damaged_checkpoint_to_go_on_from(checkpoint: Path, tmp_path: Path) -> None:
    """`resume`: none older is put aside, so there is nothing to fall back to."""
    folder = tiny_job.write_job(tmp_path / "next")
    resumed = {"job": "job-1", "step": 7, "checkpoint": str(checkpoint)}
    change(folder, job_id="job-2", resume=resumed)
    newest = start(folder).newest
    assert newest is not None
    assert newest.path == checkpoint
    flip(checkpoint / PART)
    with pytest.raises(JobFailure) as failure:
        start(folder)
    assert failure.value.reason is Reason.USER_ERROR
    assert str(failure.value) == (
        "the checkpoint of job-1 to go on from is damaged: "
        f"{checkpoint.name}/{PART} does not have its manifest's SHA-256; submit the job again with "
        "another `resume.step`"
    )
    assert checkpoint.is_dir()  # it may be a link to the other job's; nothing is set aside
    (checkpoint / PART).unlink()
    with pytest.raises(JobFailure, match=f"{checkpoint.name} lacks {PART}"):
        start(folder)


def test_the_driver_ends_before_it_starts_ranks(checkpoint: Path, tmp_path: Path) -> None:
    flip(checkpoint / PART)
    folder = using(tmp_path / "next", "model", checkpoint)
    assert tiny_job.start(folder).wait(120) == 1
    assert tiny_job.outcome(folder).reason is Reason.USER_ERROR
    assert f"{checkpoint.name}/{PART} does not have" in tiny_job.outcome(folder).message
    assert not (folder / "model").exists()  # which comes before ranks
