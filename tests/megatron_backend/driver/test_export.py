"""The comparisons before an export is published see what is wrong with it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from algorithms.errors import JobFailure
from megatron_backend.checkpoint.fence import Fence, StaleAttempt
from megatron_backend.driver import export as export_module
from megatron_backend.driver.export import (
    SCORE_TOLERANCE,
    SCORED_ROWS,
    TOLERANCE,
    Difference,
    compare,
    compare_scores,
    export,
    probe_tokens,
    sweep,
)
from megatron_backend.driver.job import open_job
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.models.tensors import SafetensorsFolder
from megatron_backend.workers.group import WorkerGroup
from megatron_backend.workers.rank import RankWorker
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.driver import tiny_job
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import read_config, save_random


def probe() -> torch.Tensor:
    return torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(1))


def logits_of(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(probe()).logits.float()


def spoil(folder: Path, name: str) -> None:
    """Turns the rows of a tensor round."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("initializer_range", "wrong"),
    [(0.2, "model.layers.1.mlp.down_proj.weight"), (0.02, "lm_head.weight")],
)
def test_rounding_passes_and_a_wrong_tensor_does_not(
    tmp_path: Path, initializer_range: float, wrong: str
) -> None:
    """Whatever the size of the logits: with the usual initial weights all of them are small."""
    model = save_random("qwen2", tmp_path / "fp32", initializer_range=initializer_range)
    logits = logits_of(model)
    assert compare(tmp_path / "fp32", probe(), logits).relative == 0
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    rounded = compare(tmp_path / "bf16", probe(), logits).relative
    assert TOLERANCE["fp32"] < rounded < TOLERANCE["bf16"] / 2
    for folder, dtype in (("fp32", "fp32"), ("bf16", "bf16")):
        spoil(tmp_path / folder, wrong)
        assert compare(tmp_path / folder, probe(), logits).relative > 2 * TOLERANCE[dtype]


def test_single_logits_and_single_tokens_do_not_decide_but_are_told(tmp_path: Path) -> None:
    logits = logits_of(save_random("llama", tmp_path))
    logits[1, 4] += 5.0
    difference = compare(tmp_path, probe(), logits)
    assert difference.largest == pytest.approx(5.0, abs=1e-4)
    assert difference.relative < TOLERANCE["fp32"]
    logits[:, :, 3] = torch.nan
    assert math.isnan(compare(tmp_path, probe(), logits).relative)


@pytest.mark.parametrize(
    ("initializer_range", "wrong"),
    [(0.2, "model.layers.1.mlp.down_proj.weight"), (0.02, "model.norm.weight")],
)
def test_scores_of_a_reward_model_are_compared_in_their_own_size(
    tmp_path: Path, initializer_range: float, wrong: str
) -> None:
    model = save_random(
        "qwen2",
        tmp_path / "fp32",
        kind=transformers.AutoModelForSequenceClassification,
        num_labels=1,
        initializer_range=initializer_range,
    )
    tokens = torch.randint(101, (SCORED_ROWS, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        rows = [model(row[None]).logits[0] for row in tokens]
    scores = torch.cat(rows)
    assert compare_scores(tmp_path / "fp32", tokens, scores).relative < SCORE_TOLERANCE["fp32"] / 2
    model.bfloat16().save_pretrained(tmp_path / "bf16")
    rounded = compare_scores(tmp_path / "bf16", tokens, scores).relative
    assert SCORE_TOLERANCE["fp32"] < rounded < SCORE_TOLERANCE["bf16"] / 2
    for folder, dtype in (("fp32", "fp32"), ("bf16", "bf16")):
        spoil(tmp_path / folder, wrong)
        wrongly = compare_scores(tmp_path / folder, tokens, scores)
        assert wrongly.relative > 2 * SCORE_TOLERANCE[dtype]


@pytest.mark.parametrize("padding", [None, 0, 7, 14])
def test_a_probe_has_no_padding_token(padding: int | None) -> None:
    """transformers reads a score at the last token that is none."""
    tokens = probe_tokens(15, padding, rows=200, length=8, seed=1)
    assert set(tokens.flatten().tolist()) == set(range(15)) - {padding}


def check_after_change(_rank: int, folder: Path, layout: Layout, change: bool) -> str | None:
    """What `differing_parameter` says of a model and the files it came from."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import differing_parameter, load_weights

    config = ModelConfig.from_hf(read_config(folder))
    chunks = build_model(config, layout)
    load_weights(chunks, config, SafetensorsFolder(folder))
    if change:
        with torch.no_grad():
            chunks[-1].decoder.layers[-1].mlp.linear_fc2.weight[3, 2] += 1e-6
    return differing_parameter(chunks, config, SafetensorsFolder(folder))


def test_ranks_find_a_number_that_is_not_theirs(ranks: Ranks, tmp_path: Path) -> None:
    save_random("qwen2-tied", tmp_path)
    layout = Layout(pp=2)
    assert ranks.run(layout, check_after_change, tmp_path, layout, False) == [None, None]
    found = ranks.run(layout, check_after_change, tmp_path, layout, True)
    assert found == [
        "decoder.layers.1.mlp.linear_fc2.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ]


def test_only_the_newest_attempt_sweeps(tmp_path: Path) -> None:
    root = tmp_path / "exports"
    (root / ".tmp-step-00000004-2-ab").mkdir(parents=True)
    (root / "step-00000002").mkdir()
    Fence(tmp_path, 2).take()
    with pytest.raises(StaleAttempt, match="attempt 2 of this job has taken over"):
        sweep(root, Fence(tmp_path, 1))
    assert len(list(root.iterdir())) == 2
    sweep(root, Fence(tmp_path, 2))
    assert [path.name for path in root.iterdir()] == ["step-00000002"]


class OneRank:
    """A group whose only rank writes a small model, and may die of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def call(self, method: Callable[..., Any], argument: Any) -> list[Any]:
        if method is RankWorker.export_hf:
            save_random("qwen2", Path(argument))
            if self.error is not None:
                raise self.error
        return [[0.0] if method is RankWorker.logits else None]


class Recorded:
    """A recorder that keeps the kinds."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def record(self, kind: str, _data: object, *, step: int) -> None:
        self.kinds.append(f"{kind} {step}")


def export_step(folder: Path, group: OneRank) -> list[str]:
    """Exports step 4 as the first attempt of the job in `folder`; what was recorded."""
    fence, recorder = Fence(folder, 1), Recorded()
    fence.take()
    export(
        open_job(folder, 1),
        fence,
        cast(WorkerGroup[RankWorker], group),
        cast(SpoolRecorder, recorder),
        step=4,
    )
    return recorder.kinds


def exported(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "exports").iterdir())


def differ_by(monkeypatch: pytest.MonkeyPatch, relative: float) -> None:
    """What the comparison of logits finds."""
    difference = Difference(largest=1.0, relative=relative)
    monkeypatch.setattr(export_module, "compare", lambda *_: difference)


def test_an_export_that_is_refused_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differ_by(monkeypatch, 1.0)
    folder = tiny_job.write_job(tmp_path / "job")
    with pytest.raises(JobFailure, match="nothing was exported"):
        export_step(folder, OneRank())
    assert exported(folder) == []


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    folder = tiny_job.write_job(tmp_path / "job")
    with pytest.raises(OSError, match="No space left"):
        export_step(folder, OneRank(OSError(28, "No space left on device")))
    assert exported(folder) == []


def test_an_export_takes_the_place_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an attempt died after it had published and before it could say so."""
    differ_by(monkeypatch, 0.0)
    folder = tiny_job.write_job(tmp_path / "job")
    earlier = folder / "exports" / "step-00000004"
    earlier.mkdir(parents=True)
    (earlier / "old").touch()
    assert export_step(folder, OneRank()) == ["export 4"]
    assert exported(folder) == ["step-00000004"]
    assert not (earlier / "old").exists()
    assert (earlier / "model.safetensors").exists()
