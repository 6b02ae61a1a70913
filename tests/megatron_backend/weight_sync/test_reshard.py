"""Weights arrive whole in every layout, by a plan that is made once, and leave nothing stale."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.protocols import Sampling
from service.spec.layout import Layout
from tests.megatron_backend.generation.generation_runs import (
    generation_rank,
    ragged_prompts,
    trained_model,
)
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import save_random

PAIRS = [
    (Layout(tp=2), Layout(dp=2)),
    (Layout(pp=2), Layout(dp=2)),
    (Layout(dp=2), Layout(tp=2)),
    (Layout(tp=2, pp=2), Layout(tp=4)),
    (Layout(tp=4), Layout(tp=2, dp=2)),
]


def synced_logits(
    _rank: int, folder: Path, train_layout: Layout, layout: Layout, tokens: Tensor
) -> tuple[Tensor, bool]:
    """[B, T, V] of the copy's own full forward, and whether the second sync used the first plan."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    model = trained_model(folder, train_layout)
    generator = generation_rank(folder, layout, model.vocab_size)
    generator.sync(model, 1)
    plan = generator._sync.plan
    with torch.no_grad():
        for parameter in generator.model.parameters():
            parameter.fill_(torch.nan)
    generator.sync(model, 2)
    with torch.no_grad():
        logits = generator.model(input_ids=tokens, position_ids=None, attention_mask=None)
        logits = gather_from_tensor_model_parallel_region(
            logits, group=generator.model.pg_collection.tp
        )
    return logits[..., :101], generator._sync.plan is plan


@pytest.mark.parametrize(
    ("train_layout", "layout"), PAIRS, ids=lambda layout: str(layout).replace(" ", "")
)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3"])
def test_the_copy_computes_what_the_model_computes(
    ranks: Ranks, tmp_path: Path, name: str, train_layout: Layout, layout: Layout
) -> None:
    reference = save_random(name, tmp_path)
    tokens = torch.tensor(ragged_prompts(11, 11, 11))
    with torch.no_grad():
        expected = reference(tokens).logits
    for logits, planned_once in ranks.run(
        train_layout, synced_logits, tmp_path, train_layout, layout, tokens
    ):
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
        assert planned_once


def before_and_after(
    _rank: int, first: Path, second: Path, layout: Layout, prompts: list[list[int]]
) -> tuple[Any, Any, Any]:
    """Completions with the first model's weights, then the second's, and of a cold copy."""
    sampling = Sampling(temperature=1.0, max_new_tokens=8, seed=3)
    model = trained_model(first, layout)
    generator = generation_rank(first, layout, model.vocab_size)
    generator.sync(model, 1)
    before = generator.generate(prompts, range(len(prompts)), sampling)
    model.load_state_dict(trained_model(second, layout).state_dict())
    labelled_old = generator.generate(prompts, range(len(prompts)), sampling)
    assert labelled_old == before, "the copy must not see weights that were not synced"
    generator.sync(model, 2)
    after = generator.generate(prompts, range(len(prompts)), sampling)
    cold = generation_rank(second, layout, model.vocab_size)
    cold.sync(model, 2)
    return before, after, cold.generate(prompts, range(len(prompts)), sampling)


def test_f05_nothing_computed_from_old_weights_survives_a_sync(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_random("qwen2-tied", first, seed=1)
    save_random("qwen2-tied", second, seed=2)
    prompts = ragged_prompts(5, 5, 9)
    for before, after, cold in ranks.run(
        Layout(tp=2), before_and_after, first, second, Layout(tp=2), prompts
    ):
        assert after == cold
        assert [one.weight_version for one in before + after] == [1] * 3 + [2] * 3
        assert [one.token_ids for one in before] != [one.token_ids for one in after]


def refusals(_rank: int, folder: Path) -> list[str]:
    """What is said of misuse."""
    model = trained_model(folder, Layout())
    sampling = Sampling(temperature=1.0, max_new_tokens=8, seed=3)
    said = []
    generator = generation_rank(folder, Layout(), model.vocab_size + 8)
    try:
        generator.generate([[1]], [0], sampling)
    except RuntimeError as error:
        said.append(str(error))
    try:
        generator.sync(model, 1)
    except ValueError as error:
        said.append(str(error))
    try:
        generation_rank(folder, Layout(tp=1, pp=2), model.vocab_size)
    except ValueError as error:
        said.append(str(error))
    return said


def test_misuse_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    save_random("qwen2-tied", tmp_path)
    [[no_weights, vocabulary, stages]] = ranks.run(Layout(), refusals, tmp_path)
    assert "call sync first" in no_weights
    assert "112 rows of vocabulary and the trained model 104" in vocabulary
    assert "no pipeline stages" in stages
