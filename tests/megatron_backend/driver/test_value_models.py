"""Whole jobs that train value models, with real Ray and real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatron_backend.checkpoint import contents
from service.spec import WorkerEvent
from service.spec.layout import Layout
from tests.megatron_backend.checkpoint import reshard_ranks
from tests.megatron_backend.driver import tiny_job, value_jobs
from tests.megatron_backend.ranks import Ranks

pytestmark = pytest.mark.long


def run(folder: Path) -> Path:
    assert tiny_job.start(folder).wait(600) == 0, tiny_job.log_text(folder)
    return folder


def metrics(folder: Path) -> list[WorkerEvent]:
    return tiny_job.events(folder, kind="metrics")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model's job on two data-parallel ranks, to its end."""
    folder = tmp_path_factory.mktemp("jobs") / "reward"
    training = {"steps": 24, "global_batch_size": 6, "max_length": 16}
    return run(value_jobs.write_reward_job(folder, parallel={"dp": 2}, training=training))


def pair_losses(folder: Path) -> torch.Tensor:
    """-log sigmoid(chosen - rejected) of every row, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    losses = []
    for index in range(tiny_job.ROWS):
        row = value_jobs.preference(index)
        scores = []
        for side in ("chosen", "rejected"):
            ids = tokenizer.apply_chat_template(row[side], return_dict=True)["input_ids"]
            with torch.no_grad():
                scores.append(model(torch.tensor([ids])).logits[0, 0])
        losses.append(-torch.nn.functional.logsigmoid(scores[0] - scores[1]))
    return torch.stack(losses)


def test_a_reward_model_from_start_to_export(reward_model: Path) -> None:
    assert tiny_job.outcome(reward_model).status == "succeeded"
    steps = metrics(reward_model)
    (event,) = tiny_job.events(reward_model, kind="export")
    assert event.data["max_logit_diff"] < 1e-4
    losses = pair_losses(Path(event.data["path"]))
    assert steps[-1].data["loss"] < steps[0].data["loss"] / 2
    # Four batches are all rows; each was measured before its own step.
    trained = sum(step.data["loss"] for step in steps[-4:]) / 4
    assert float(losses.mean()) <= trained * 1.05
    assert (losses < 0.693).double().mean() > 0.9
    assert "sync" not in {e.data["phase"] for e in tiny_job.events(reward_model, kind="progress")}


def test_a_reward_models_checkpoint_starts_another_job(reward_model: Path, tmp_path: Path) -> None:
    """Under another layout, with its head: the loss is where the other job left off."""
    job = value_jobs.write_reward_job(
        tmp_path / "next",
        parallel={"tp": 2},
        training={"steps": 4, "global_batch_size": 6, "max_length": 16},
        optimizer={"learning_rate": 1e-9},
        checkpoint={"export": False},
    )
    tiny_job.start_from_checkpoint(job, reward_model / "checkpoints" / "step-00000024")
    (event,) = tiny_job.events(reward_model, kind="export")
    expected = float(pair_losses(Path(event.data["path"])).mean())
    found = [step.data["loss"] for step in metrics(run(job))]
    assert sum(found) / 4 == pytest.approx(expected, rel=1e-4)


STEPS, SAVED = 6, 4
SPEC: dict[str, Any] = {
    "checkpoint": {"every_steps": 2, "keep_every": 2, "keep_last": 1, "async_save": True},
    "training": {"steps": STEPS, "global_batch_size": 8, "max_length": value_jobs.LENGTH},
}
NAMES = (
    *("loss", "gradient_norm", "value_loss", "critic_gradient_norm", "learning_rate"),
    *("reward_kl", "value_mean", "return_mean"),
)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of PPO that ran to its end in one go, saving in the background."""
    folder = tmp_path_factory.mktemp("jobs") / "ppo"
    return run(value_jobs.write_ppo_job(folder, **SPEC, parallel={"dp": 2}))


def resume(whole: Path, folder: Path, **spec: Any) -> Path:
    """A job that goes on with the checkpoint, as the service resolves `resume`."""
    value_jobs.write_ppo_job(folder, **SPEC | spec)
    path = folder / "context.json"
    document = json.loads(path.read_text())
    document["job_id"] = "job-2"
    checkpoint = whole / "checkpoints" / f"step-{SAVED:08d}"
    document["resume"] = {"job": "job-1", "step": SAVED, "checkpoint": str(checkpoint)}
    path.write_text(json.dumps(document))
    return run(folder)


def numbers(events: list[WorkerEvent]) -> list[list[float]]:
    return [[event.data[name] for name in NAMES] for event in events]


def state(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a job's last checkpoint."""
    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    (tensors,) = ranks.run(Layout(), reshard_ranks.whole_tensors, last)
    return tensors


def test_a_policy_is_exported_and_its_critic_is_not(ppo: Path) -> None:
    tensors = load_file(ppo / "exports" / f"step-{STEPS:08d}" / "model.safetensors")
    assert "score.weight" not in tensors
    for step in metrics(ppo):
        assert step.data["critic_gradient_norm"] > 0


def test_the_same_layout_goes_on_bit_for_bit(ranks: Ranks, ppo: Path, tmp_path: Path) -> None:
    """Metrics of both models, all weights and all moments, whichever way the last save goes: the
    job that ran through saves in the background, this one does not."""
    saves = SPEC["checkpoint"] | {"async_save": False, "export": False}
    job = resume(ppo, tmp_path / "same", parallel={"dp": 2}, checkpoint=saves)
    assert [event.step for event in metrics(job)] == list(range(SAVED + 1, STEPS + 1))
    assert numbers(metrics(job)) == numbers(metrics(ppo)[SAVED:])
    expected, found = state(ranks, ppo), state(ranks, job)
    assert found.keys() == expected.keys()
    assert any(name.startswith(f"{contents.CRITIC}optimizer.state.exp_avg") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_another_layout_goes_on_alike(ppo: Path, tmp_path: Path) -> None:
    saves = SPEC["checkpoint"] | {"export": False}
    job = resume(ppo, tmp_path / "other", parallel={"tp": 2}, checkpoint=saves)
    for found, expected in zip(numbers(metrics(job)), numbers(metrics(ppo)[SAVED:]), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_killed_rank_brings_its_critic_back(ranks: Ranks, ppo: Path, tmp_path: Path) -> None:
    """kill -9 of one of two ranks inside an attempt: the same end as without it."""
    spec = SPEC | {"checkpoint": SPEC["checkpoint"] | {"export": False}}
    job = value_jobs.write_ppo_job(tmp_path / "killed", **spec, parallel={"dp": 2})
    driver = tiny_job.start(job)
    tiny_job.wait_for(
        lambda: 2 in [event.step for event in tiny_job.events(job, kind="checkpoint")]
    )
    tiny_job.rank_processes(job)[1].kill()
    assert driver.wait(600) == 0, tiny_job.log_text(job)
    assert tiny_job.events(job, kind="warning")
    assert numbers(metrics(job)) == numbers(metrics(ppo))
    expected, found = state(ranks, ppo), state(ranks, job)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
