"""A teacher and a reward model on ranks of their own, in every layout that they may have.

The references are transformers' own models, one row at a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_backend.training.shares import gather_rows
from megatron_backend.workers.frozen import TeacherRank
from service.spec import JobContext
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, save_random
from tests.megatron_backend.training.training_runs import random_batch
from tests.megatron_backend.workers.frozen_ranks import (
    STUDENT_VOCABULARY,
    TEMPERATURE,
    distillation,
    score,
    teach,
)
from tests.ports import free_port

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    pytest.param(Layout(tp=2, pp=2), marks=pytest.mark.slow),
]
CUTS: list[dict[str, Any]] = [
    {"micro_batch_tokens": 24},
    {"packing": False, "micro_batch_size": 2},
]
COUNTS = [4, STUDENT_VOCABULARY, 200]


def likeliest(model: transformers.PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Every token of the student's in the order of likelihood, and log-probs [7, 13, 97]."""
    batch = random_batch(rows=7)
    shape = (*batch.tokens.shape, STUDENT_VOCABULARY)
    ids, log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for row, length in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            logits = model(batch.tokens[row : row + 1, :length]).logits[0, :-1]
        known = torch.log_softmax(logits[:, :STUDENT_VOCABULARY].double() / TEMPERATURE, dim=-1)
        values, order = known.sort(-1, descending=True)
        log_probs[row, 1:length], ids[row, 1:length] = values.float(), order
    trained = batch.loss_mask.unsqueeze(-1)
    return ids * trained.long(), log_probs * trained


def by_port(contexts: Sequence[JobContext]) -> dict[int, JobContext]:
    """Ranks that join anew need another port."""
    return {free_port(): context for context in contexts}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Tensor, Tensor]]:
    """A teacher's folder, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("teacher")
    return folder, likeliest(save_random("qwen2-tied", folder, seed=2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_teacher_says_what_transformers_says(
    ranks: Ranks, teacher: tuple[Path, tuple[Tensor, Tensor]], layout: Layout
) -> None:
    """Of the tokens that the student has too, at the temperature that it samples at."""
    folder, (ids, log_probs) = teacher
    contexts = [distillation(folder, CONFIGS["qwen2-tied"], layout, **cut) for cut in CUTS]
    answers = ranks.run(layout, teach, layout, by_port(contexts), COUNTS)
    for cut in range(len(CUTS)):
        for place, count in enumerate(COUNTS):
            shares = [answer[cut][place] for answer in answers]
            assert [s is not None for s in shares] == [
                rank in layout.output_ranks for rank in range(layout.world_size)
            ]
            found = [
                gather_rows(layout, [None if s is None else s[index] for s in shares])
                for index in range(2)
            ]
            kept = min(count, STUDENT_VOCABULARY)
            assert found[0].shape == (*random_batch(rows=7).tokens.shape, kept)
            torch.testing.assert_close(found[1], log_probs[..., :kept], rtol=2e-5, atol=2e-5)
            if count == 4:
                assert torch.equal(found[0], ids[..., :4])
            else:  # rounding may swap two that are all but equal
                assert torch.equal(found[0].sort(-1).values, ids.sort(-1).values)


def test_a_teacher_with_experts_under_tensor_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    model = save_random("qwen3_moe", tmp_path, seed=2)
    ids, log_probs = likeliest(model)
    layout = Layout(tp=2, sequence_parallel=True)
    context = distillation(tmp_path, CONFIGS["qwen3_moe"], layout)
    answers = ranks.run(layout, teach, layout, by_port([context]), [4])
    found = [gather_rows(layout, [share]) for share in answers[0][0][0]]
    torch.testing.assert_close(found[1], log_probs[..., :4], rtol=2e-5, atol=2e-5)
    assert torch.equal(found[0], ids[..., :4])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reward_model_says_what_transformers_says(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    torch.manual_seed(3)
    changes = {"num_labels": 1, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(**CONFIGS["qwen3"], **changes)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    batch = random_batch(rows=7)
    with torch.no_grad():
        rows = [
            batch.tokens[row : row + 1, :length]
            for row, length in enumerate(batch.lengths.tolist())
        ]
        expected = torch.cat([model(tokens).logits[0] for tokens in rows])
    assert expected.std() > 0.1
    contexts = [scored(tmp_path, CONFIGS["qwen3"], layout, cut) for cut in CUTS]
    answers = ranks.run(layout, score, layout, by_port(contexts))
    for cut in range(len(CUTS)):
        shares = [None if answer[cut] is None else answer[cut][0] for answer in answers]
        found = gather_rows(layout, shares)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def scored(
    folder: Path, config: dict[str, Any], layout: Layout, training: dict[str, Any]
) -> JobContext:
    """A GRPO job with the reward model in `folder`."""
    document = distillation(folder, config, layout, **training).model_dump(mode="json")
    document["spec"]["algorithm"] = {"type": "grpo"}
    document["spec"]["reward"] = {"model": {"source": {"path": "r"}}}
    document["other_models"] = {"reward": document["other_models"]["teacher"]}
    return JobContext.model_validate(document)


def test_a_rank_without_a_model_says_so() -> None:
    with pytest.raises(RuntimeError, match="call setup first"):
        TeacherRank(0, Layout()).likeliest(random_batch(), 3)


def test_an_impossible_layout_is_refused_before_ranks_join(tmp_path: Path) -> None:
    layout = Layout(tp=3)
    context = distillation(tmp_path, CONFIGS["qwen3"], layout)
    with pytest.raises(ValueError, match="tp = 3 does not divide"):
        TeacherRank(0, layout).setup(context, "127.0.0.1", 1)
