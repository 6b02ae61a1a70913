"""A PPO job's ranks: two models that learn apart from each other, and where the critic starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification

from algorithms.batch import Batch, Normalizer
from megatron_backend.checkpoint import contents
from megatron_backend.models.tensors import RandomTensors
from megatron_backend.training.shares import gather_rows
from megatron_backend.workers.hangs import PHASE_OF
from megatron_backend.workers.rank import RankWorker
from service.spec import JobContext
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, save_random
from tests.megatron_backend.training.training_runs import random_batch
from tests.ports import free_port

POLICY, CRITIC = "qwen2-tied", "qwen3"
LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)]


def model_of(name: str, folder: Path, kind: str = "huggingface") -> dict[str, Any]:
    """The JSON of a ResolvedModel."""
    return {
        "kind": kind,
        "config": CONFIGS[name],
        "tokenizer": str(folder),
        "weights": str(folder),
    }


def job(layout: Layout, policy: dict[str, Any], critic: dict[str, Any] | None) -> JobContext:
    """A PPO job."""
    source = {"init": {"config": {}, "tokenizer": "t"}}
    value_model = {} if critic is None else {"source": source}
    spec = {
        "name": "test",
        "model": source,
        "algorithm": {"type": "ppo", "value_model": value_model, "kl_coef": 0.0},
        "environment": {"id": "tools/calculator"},
        "training": {"steps": 1, "seed": 5, "max_length": 64, "micro_batch_size": 2},
        "parallel": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
    }
    return JobContext.model_validate(
        {
            "job_id": "job-1",
            "spec": spec,
            "dp": layout.dp,
            "model": policy,
            "other_models": {} if critic is None else {"critic": critic},
        }
    )


def rollout() -> Batch:
    """What PPO's two losses read."""
    batch = random_batch()
    generator = torch.Generator().manual_seed(1)
    shape = batch.tokens.shape
    return batch.with_per_token(
        values=torch.randn(shape, generator=generator),
        returns=torch.randn(shape, generator=generator),
    )


def play(
    rank: int, layout: Layout, context: JobContext, port: int, staged: Path | None
) -> list[tuple[Any, Any]]:
    """(values, log-probs) at the start, after a step of the critic, and after one of the policy.

    Where there is a `staged` folder, a checkpoint goes there before the steps.
    """
    worker = joined(rank, layout, context, port)
    if staged is not None:
        # It is to hold what models start from, which no step may have changed.
        written = worker.begin_save(str(staged), False)
        assert written is not None
        assert written.error is None
    batch = rollout()
    answers = [(worker.values(batch), worker.log_probs(batch))]
    normalizer = Normalizer.of(batch)
    assert worker.train_step(batch, normalizer, learning_rate=1e-2, model="critic").finite
    answers.append((worker.values(batch), worker.log_probs(batch)))
    assert worker.train_step(batch, normalizer, learning_rate=1e-2).finite
    answers.append((worker.values(batch), worker.log_probs(batch)))
    worker.shutdown()
    return answers


def joined(rank: int, layout: Layout, context: JobContext, port: int) -> RankWorker:
    from megatron_backend.runtime import distributed

    distributed.shutdown()  # the harness has joined the ranks already; the worker does it itself
    worker = RankWorker(rank, layout)
    worker.setup(context, "127.0.0.1", port)
    return worker


def run(
    ranks: Ranks, layout: Layout, context: JobContext, staged: Path | None = None
) -> list[tuple[Tensor, Tensor]]:
    """`play` with whole tensors."""
    if staged is not None:
        for name in (contents.STATE, contents.RANDOM):
            (staged / name).mkdir(parents=True)
    answers = ranks.run(layout, play, layout, context, free_port(), staged)
    return [
        (
            gather_rows(layout, [answer[moment][0] for answer in answers]),
            gather_rows(layout, [answer[moment][1] for answer in answers]),
        )
        for moment in range(3)
    ]


def plain_values(trunk: Any, head: Tensor) -> Tensor:
    """By transformers' decoder and a product by hand; the value of a state before its token."""
    batch = rollout()
    with torch.no_grad():
        numbers = (trunk(batch.tokens).last_hidden_state * head).sum(-1)
    return torch.nn.functional.pad(numbers, (1, 0))[:, :-1] * batch.loss_mask


def new_head(name: str) -> Tensor:
    return RandomTensors(ModelConfig.from_hf(CONFIGS[name]), 5, "value").read("score.weight")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_policy_and_critic_learn_apart_from_each_other(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    """The critic has an architecture and weights of its own, and a head that is trained already."""
    save_random(POLICY, tmp_path / "policy")
    critic = save_random(
        CRITIC, tmp_path / "critic", seed=3, kind=AutoModelForSequenceClassification, num_labels=1
    )
    context = job(
        layout, model_of(POLICY, tmp_path / "policy"), model_of(CRITIC, tmp_path / "critic")
    )
    start, learned, after = run(ranks, layout, context)
    expected = plain_values(critic.model, critic.score.weight.detach())
    torch.testing.assert_close(start[0], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(learned[0], start[0], atol=1e-3)
    assert torch.equal(learned[1], start[1])
    assert torch.equal(after[0], learned[0])
    assert not torch.allclose(after[1], learned[1], atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_critic_starts_as_the_policy_with_a_new_head(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    save_random(POLICY, tmp_path)
    start, *_ = run(ranks, layout, job(layout, model_of(POLICY, tmp_path), None))
    expected = plain_values(AutoModel.from_pretrained(tmp_path), new_head(POLICY))
    torch.testing.assert_close(start[0], expected, rtol=1e-4, atol=1e-4)


def test_a_critic_starts_from_checkpoints_of_every_kind(ranks: Ranks, tmp_path: Path) -> None:
    """From a job with a critic comes that one; as `model` its policy, and a new head."""
    layout, earlier = Layout(), tmp_path / "step-00000010"
    save_random(POLICY, tmp_path / "policy")
    critic = save_random(
        POLICY, tmp_path / "critic", seed=3, kind=AutoModelForSequenceClassification, num_labels=1
    )
    policy = model_of(POLICY, tmp_path / "policy")
    own = run(ranks, layout, job(layout, policy, model_of(POLICY, tmp_path / "critic")), earlier)
    saved = model_of(POLICY, earlier, "checkpoint")
    (again, *_) = run(ranks, layout, job(layout, policy, saved))
    assert torch.equal(again[0], own[0][0])
    torch.testing.assert_close(
        again[0], plain_values(critic.model, critic.score.weight.detach()), rtol=1e-4, atol=1e-4
    )
    (from_policy, *_) = run(ranks, layout, job(layout, saved, None))
    expected = plain_values(AutoModel.from_pretrained(tmp_path / "policy"), new_head(POLICY))
    torch.testing.assert_close(from_policy[0], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(from_policy[1], own[0][1])


def test_calls_of_a_critic_have_the_deadline_of_a_step() -> None:
    for method in (RankWorker.train_step, RankWorker.values, RankWorker.scores):
        assert PHASE_OF[method.__name__] == "step"


def ask_without(rank: int, layout: Layout, context: JobContext, port: int) -> None:
    worker = joined(rank, layout, context, port)
    with pytest.raises(RuntimeError, match="has no critic"):
        worker.values(rollout())
    worker.shutdown()


def test_a_job_without_a_critic_says_so(ranks: Ranks, tmp_path: Path) -> None:
    save_random(POLICY, tmp_path)
    context = job(Layout(), model_of(POLICY, tmp_path), None)
    algorithm = {"type": "grpo", "kl_coef": 0.0}
    document = context.model_dump(mode="json")
    document["spec"]["algorithm"] = algorithm
    ranks.run(Layout(), ask_without, Layout(), JobContext.model_validate(document), free_port())


def export_reward_model(
    rank: int, layout: Layout, context: JobContext, port: int, folder: Path
) -> str | None:
    """Trains a reward model for a step, exports it, and compares what is there."""
    worker = joined(rank, layout, context, port)
    batch = random_batch()
    pairs = Batch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask, unit=2)
    assert worker.train_step(pairs, Normalizer.of(pairs), learning_rate=1e-2).finite
    worker.export_hf(str(folder))
    difference = worker.check_export(str(folder))
    worker.shutdown()
    return difference


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reward_models_rank_trains_and_exports(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    save_random("llama", tmp_path / "start")
    document = job(layout, model_of("llama", tmp_path / "start"), None).model_dump(mode="json")
    document["spec"] |= {
        "algorithm": {"type": "reward_model"},
        "environment": None,
        "data": {"train": "file-0123456789abcdef"},
    }
    context = JobContext.model_validate(document)
    out = tmp_path / "end"
    found = ranks.run(layout, export_reward_model, layout, context, free_port(), out)
    assert set(found) == {None}
    tensors = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in tensors
    # Adam's first step moves every weight by about the learning rate.
    moved = (tensors["score.weight"] - new_head("llama")).abs()
    assert 5e-3 < moved.median() < 2e-2
