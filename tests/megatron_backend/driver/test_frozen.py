"""Whole jobs with a teacher or a reward model on ranks of its own, with real Ray and real ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from service.spec import Reason
from tests.megatron_backend.driver import frozen_job, tiny_job

pytestmark = pytest.mark.slow

STEPS = 100
KL = 0.15
"""What the student ends below, from about 1."""


def distillation(folder: Path, teacher: Path, checkpoint: dict[str, Any] | None = None) -> Path:
    return frozen_job.write_job(
        folder,
        "teacher",
        teacher,
        algorithm={
            "type": "distillation",
            "teacher_model": {"source": {"path": "teacher"}, "layout": {"dp": 1}},
            "top_k": 8,
        },
        training={"steps": STEPS, "global_batch_size": 24, "max_length": frozen_job.LENGTH},
        checkpoint=checkpoint or {"every_steps": 20},
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("teacher")
    return folder, frozen_job.save_teacher(folder)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, teacher: tuple[Path, PreTrainedModel]
) -> Path:
    """A distillation that ran to its end in one go."""
    job = distillation(tmp_path_factory.mktemp("jobs") / "finished", teacher[0])
    assert tiny_job.start(job).wait(400) == 0, tiny_job.log_text(job)
    return job


def answers_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, int]:
    """How a model answers a question of the job's kind, 64 times; where its answers begin."""
    question = "State the final answer to the following arithmetic problem: 4 + 9 ="
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = torch.tensor([tokenizer(text)["input_ids"]] * 64)
    torch.manual_seed(5)
    length = {"min_new_tokens": 6, "max_new_tokens": 6}
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=True, **length), prompt.shape[1]


def reverse_kl(
    student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> float:
    """KL(student || teacher) at the student's own tokens, by transformers, over all tokens."""
    tokens, start = answers_of(student, tokenizer)
    with torch.no_grad():
        ours, theirs = (
            model(tokens).logits[:, start - 1 : -1].double().log_softmax(-1)
            for model in (student, teacher)
        )
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


@pytest.mark.long
def test_distillation_brings_the_student_to_its_teacher(
    finished: Path, teacher: tuple[Path, PreTrainedModel]
) -> None:
    metrics = [event.data for event in tiny_job.events(finished, kind="metrics")]
    assert len(metrics) == STEPS
    first, last = metrics[0], metrics[-1]
    assert first["reverse_kl"] == pytest.approx(first["loss"], rel=1e-4)
    assert first["reverse_kl"] > 0.9
    assert last["reverse_kl"] < KL
    missing = [row["teacher_top_mass"] - row["student_top_mass"] for row in (first, last)]
    assert missing[0] > 0.3
    assert abs(missing[1]) < 0.05
    assert all(row["rollout_ratio_deviation"] < 1e-3 for row in metrics)
    (export,) = tiny_job.events(finished, kind="export")
    student = AutoModelForCausalLM.from_pretrained(export.data["path"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(export.data["path"])
    assert reverse_kl(student, teacher[1], tokenizer) < KL
    assert not tiny_job.processes(finished)


def test_a_teacher_of_another_vocabulary_is_refused(
    tmp_path: Path, teacher: tuple[Path, PreTrainedModel]
) -> None:
    job = distillation(tmp_path / "job", teacher[0])
    path = job / "tokenizer" / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"a": 5', '"x": 5').replace('"b": 6', '"a": 6'))
    assert path.read_text() != text
    assert tiny_job.start(job).wait(240) == 1
    outcome = tiny_job.outcome(job)
    assert outcome.reason is Reason.USER_ERROR
    assert outcome.message.startswith(
        "the teacher has another vocabulary than the model that is trained: 'x' is 5 here; the "
        "teacher has none."
    )
    assert not tiny_job.events(job, kind="metrics")


@pytest.mark.long
def test_d21_ranks_of_either_model_that_die_are_replaced(
    finished: Path, teacher: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """First one and then the other is killed, and the job takes the same steps as without."""
    saves = {"every_steps": 20, "export": False}
    job = distillation(tmp_path / "killed", teacher[0], checkpoint=saves)
    driver = tiny_job.start(job)
    tiny_job.wait_for(lambda: tiny_job.events(job, kind="checkpoint"))
    processes = tiny_job.rank_processes(job)
    assert len(processes) == 2
    for count, process in enumerate(processes, 1):
        process.kill()
        tiny_job.wait_for(lambda count=count: len(tiny_job.events(job, kind="warning")) == count)
        saved = len(tiny_job.events(job, kind="checkpoint"))
        tiny_job.wait_for(lambda saved=saved: len(tiny_job.events(job, kind="checkpoint")) > saved)
    assert driver.wait(400) == 0, tiny_job.log_text(job)
    messages = sorted(e.data["message"] for e in tiny_job.events(job, kind="warning"))
    assert messages[0].startswith("rank 0 died: ")
    assert messages[1].startswith("the teacher's rank 0 died: ")
    ways = [tiny_job.events(folder, kind="metrics") for folder in (job, finished)]
    losses = [[(event.step, event.data["loss"]) for event in way] for way in ways]
    assert losses[0] == losses[1]


@pytest.mark.long
def test_a_policy_learns_what_a_reward_model_likes(tmp_path: Path) -> None:
    """The environment's own reward counts nothing."""
    frozen_job.save_reward_model(tmp_path / "reward")
    job = frozen_job.write_job(
        tmp_path / "job",
        "reward",
        tmp_path / "reward",
        algorithm={"type": "grpo", "group_size": 8},
        reward={
            "environment_weight": 0.0,
            "model": {"source": {"path": "reward"}, "layout": {"dp": 2}},
        },
        training={"steps": 30, "global_batch_size": 64, "max_length": frozen_job.LENGTH},
        checkpoint={"export": False},
    )
    assert tiny_job.start(job).wait(400) == 0, tiny_job.log_text(job)
    metrics = [event.data for event in tiny_job.events(job, kind="metrics")]
    means = [row["reward_model_mean"] for row in metrics]
    assert "seconds_reward" in metrics[0]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 2.0
