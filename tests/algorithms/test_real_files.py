"""The public sample files go through the loop of the algorithm that takes their rows.

Where a first loss is known by hand it is compared: policy and reference are one model then.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.algorithm import load_algorithm
from algorithms.loop import open_loop
from algorithms.phases import PhaseClock
from algorithms.protocols import Workers
from service.settings import DATA_ROOTS_VARIABLE
from service.spec import JobContext, JobSpec, ResolvedModel
from tests.algorithms.tiny_policy import (
    EventList,
    FolderCheckpoints,
    TinyPolicy,
    TinyValueModel,
    tiny_model,
)

STEPS = 3


def _train(
    path: Path,
    algorithm: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    **data: Any,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and warnings of a few steps on a file."""
    spec = JobSpec.model_validate(
        {
            "name": "real",
            "model": {"path": "tiny"},
            "algorithm": algorithm,
            "data": {"train": str(path), "too_long": "truncate-left", **data},
            "optimizer": {"learning_rate": 0.01},
            "training": {"steps": STEPS, "global_batch_size": 4, "max_length": 384},
        }
    )
    context = JobContext(
        job_id="job-1",
        spec=spec,
        dp=1,
        model=ResolvedModel(kind="random", config={}, tokenizer="tiny"),
        files={str(path): str(path)},
    )
    model, maths = tiny_model(len(tokenizer)), load_algorithm(spec.algorithm)
    policy = TinyPolicy(model, maths, stop_id=tokenizer.eos_token_id)
    train: Any = policy if spec.algorithm.head == "vocabulary" else _values(model, maths.loss)
    checkpoints = FolderCheckpoints(folder, policy)
    recorder = EventList()
    workers = Workers(train=train, generator=None, checkpoints=checkpoints)
    assert open_loop(context, workers, tokenizer, recorder).run() == STEPS
    return recorder.of("metrics"), recorder.of("warning")


def _values(model: Any, loss: Any) -> Any:
    class _RewardModel(TinyValueModel):
        def tied_difference(self) -> float | None:
            return None

    return _RewardModel(model, loss)


@pytest.mark.parametrize("name", ["identity.json", "glaive_toolcall_en_demo.json"])
def test_sft(
    llamafactory: Path, name: str, chatml: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    metrics, _ = _train(llamafactory / name, {"type": "sft"}, chatml, tmp_path)
    # Random weights know nothing yet: about the entropy of a uniform choice.
    assert metrics[0]["loss"] == pytest.approx(math.log(len(chatml)), rel=0.02)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert [m["samples"] for m in metrics] == [4] * STEPS


def test_dpo(llamafactory: Path, chatml: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = llamafactory / "dpo_en_demo.json"
    metrics, warnings = _train(path, {"type": "dpo"}, chatml, tmp_path)
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in metrics)
    assert [m["samples"] for m in metrics] == [8] * STEPS  # two sequences a pair
    (warning,) = warnings
    assert warning["dropped"] > 0  # answers that leave no room for their prompt


def test_kto(llamafactory: Path, chatml: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = llamafactory / "kto_en_demo.json"
    metrics, _ = _train(path, {"type": "kto"}, chatml, tmp_path)
    assert metrics[0]["loss"] == pytest.approx(0.5, abs=1e-6)  # sigmoid(0), whatever the label
    assert all(math.isfinite(m["loss"]) for m in metrics)


def test_reward_model(llamafactory: Path, chatml: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = llamafactory / "dpo_en_demo.json"
    metrics, _ = _train(path, {"type": "reward_model"}, chatml, tmp_path)
    assert all(math.isfinite(m["loss"]) and m["gradient_norm"] > 0 for m in metrics)
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=0.7)  # scores near 0


def test_grpo(
    gsm8k: Path, chatml: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_ROOTS_VARIABLE, str(gsm8k))
    spec = JobSpec.model_validate(
        {
            "name": "real",
            "model": {"path": "tiny"},
            "algorithm": {"type": "grpo", "group_size": 2, "kl_coef": 0.1},
            "environment": {"id": "math/gsm8k", "config": {"path": "train.jsonl"}},
            "rollout": {"max_new_tokens": 4},
            "optimizer": {"learning_rate": 0.01},
            "training": {"steps": STEPS, "global_batch_size": 4, "max_length": 512},
        }
    )
    context = JobContext(
        job_id="job-1",
        spec=spec,
        dp=1,
        model=ResolvedModel(kind="random", config={}, tokenizer="tiny"),
    )
    policy = TinyPolicy(
        tiny_model(len(chatml)),
        load_algorithm(spec.algorithm),
        stop_id=chatml.eos_token_id,
        max_length=512,
    )
    recorder = EventList()
    workers = Workers(
        train=policy, generator=policy, checkpoints=FolderCheckpoints(tmp_path, policy)
    )
    loop = open_loop(context, workers, chatml, recorder)
    policy.sync_weights(0)
    batch = loop.source.draw(1, PhaseClock()).batch
    with (gsm8k / "train.jsonl").open(encoding="utf-8") as file:
        questions = {json.loads(line)["question"] for line in file}
    for tokens, length, trained in zip(batch.tokens, batch.lengths, batch.loss_mask, strict=True):
        written = int(trained.sum())
        assert 1 <= written <= 4
        assert trained[length - written : length].all()  # the answer, whole, and nothing else
        prompt = chatml.decode(tokens[: length - written])
        assert prompt.endswith("<|im_start|>assistant\n")
        assert any(question in prompt for question in questions)
    loop.source.restore({})
    assert loop.run() == STEPS
    metrics = recorder.of("metrics")
    assert all(math.isfinite(m["loss"]) and m["reward_mean"] in (0, 0.25, 0.5) for m in metrics)
    assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-9)  # policy and reference are one model
    assert [m["episodes"] for m in metrics] == [4] * STEPS
