"""Weights arrive whole in every layout, by a plan that is made once, and leave nothing stale."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.protocols import Sampling
from service.spec.layout import Layout
from service.spec.padding import padded_vocab_size
from tests.megatron_backend.generation.generation_runs import (
    generation_rank,
    ragged_prompts,
    trained_model,
)
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import read_config, save_random
from tests.megatron_backend.weight_sync.sync_runs import (
    generate_side,
    sync_of_megatron,
    sync_twice,
    train_side,
)
from tests.ports import free_port

# Training and generation layouts: two or four ranks that hold both.
PAIRS = [
    ("qwen2-tied", Layout(tp=2), Layout(dp=2)),
    ("qwen2-tied", Layout(pp=2), Layout(tp=2)),
    ("qwen3", Layout(pp=2), Layout(dp=2)),
    ("qwen3", Layout(dp=2), Layout(tp=2)),
    ("llama", Layout(pp=2, vpp=2), Layout(tp=2)),
    ("qwen3_moe", Layout(ep=2, dp=2), Layout(dp=2)),
    ("mixtral", Layout(pp=2), Layout(dp=2)),
    ("qwen2-tied", Layout(cp=2), Layout(tp=2)),
    ("qwen3_moe", Layout(cp=2, ep=2), Layout(dp=2)),
    ("qwen2-tied", Layout(tp=2, pp=2), Layout(tp=4)),
    ("qwen3_moe", Layout(tp=2, ep=2, dp=2, sequence_parallel=True), Layout(dp=4)),
]


def saved(name: str, folder: Path, layout: Layout) -> Path:
    """A random model's files; with virtual stages it has a layer for each."""
    save_random(name, folder, **({"num_hidden_layers": 4} if layout.vpp > 1 else {}))
    return folder


@pytest.mark.parametrize(
    ("name", "train_layout", "layout"), PAIRS, ids=lambda value: str(value).replace(" ", "")
)
def test_every_layout_gives_the_copy_the_same_bits(
    ranks: Ranks, tmp_path: Path, name: str, train_layout: Layout, layout: Layout
) -> None:
    folder = saved(name, tmp_path, train_layout)
    for wrong, plans, messages in ranks.run(
        train_layout, sync_twice, folder, train_layout, layout, True
    ):
        assert wrong == []
        assert plans == 1
        assert messages == 0, "ranks of one machine write into each other's memory"


@pytest.mark.parametrize(
    ("name", "train_layout", "layout"), PAIRS[:6:5], ids=lambda value: str(value).replace(" ", "")
)
def test_messages_carry_the_same_bits(
    ranks: Ranks, tmp_path: Path, name: str, train_layout: Layout, layout: Layout
) -> None:
    folder = saved(name, tmp_path, train_layout)
    results = ranks.run(train_layout, sync_twice, folder, train_layout, layout, False)
    assert [wrong for wrong, _, _ in results] == [[], []]
    assert [plans for _, plans, _ in results] == [1, 1]
    assert all(messages > 0 for _, _, messages in results)


@pytest.mark.parametrize(
    ("name", "train_layout", "layout"), PAIRS[:4], ids=lambda value: str(value).replace(" ", "")
)
def test_megatrons_own_resharding_gives_the_same_bits(
    ranks: Ranks, tmp_path: Path, name: str, train_layout: Layout, layout: Layout
) -> None:
    folder = saved(name, tmp_path, train_layout)
    assert ranks.run(train_layout, sync_of_megatron, folder, train_layout, layout) == [[], []]


@pytest.mark.parametrize(
    ("name", "train_layout", "layout"),
    [
        ("qwen2-tied", Layout(tp=2), Layout()),
        ("qwen3_moe", Layout(ep=2, dp=2), Layout()),
        ("qwen2-tied", Layout(pp=2), Layout(tp=2)),
        ("qwen3", Layout(), Layout(tp=2)),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_generator_on_ranks_of_its_own_gets_the_same_bits(
    ranks: Ranks, tmp_path: Path, name: str, train_layout: Layout, layout: Layout
) -> None:
    save_random(name, tmp_path)
    port, size = free_port(), train_layout.world_size + layout.world_size
    vocabulary = padded_vocab_size(read_config(tmp_path)["vocab_size"], tp=train_layout.tp)
    generators = Ranks()
    try:
        with ThreadPoolExecutor(1) as pool:
            trainers = pool.submit(
                ranks.run, train_layout, train_side, tmp_path, train_layout, port, size
            )
            wrong = generators.run(layout, generate_side, tmp_path, layout, port, size, vocabulary)
            # Each trainer sends one message to each generator.
            assert trainers.result() == [layout.world_size] * train_layout.world_size
    finally:
        generators.close()
    assert wrong == [[[], []]] * layout.world_size


def synced_logits(
    _rank: int, folder: Path, train_layout: Layout, layout: Layout, tokens: Tensor
) -> Tensor:
    """[B, T, V] of the copy's own full forward."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    model = trained_model(folder, train_layout)
    generator = generation_rank(folder, layout, model.vocab_size)
    generator.sync([model], 1)
    with torch.no_grad():
        logits = generator.model(input_ids=tokens, position_ids=None, attention_mask=None)
        logits = gather_from_tensor_model_parallel_region(
            logits, group=generator.model.pg_collection.tp
        )
    return logits[..., :101]


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3"])
def test_the_copy_computes_what_the_model_computes(ranks: Ranks, tmp_path: Path, name: str) -> None:
    train_layout, layout = Layout(pp=2), Layout(tp=2)
    reference = save_random(name, tmp_path)
    tokens = torch.tensor(ragged_prompts(11, 11, 11))
    with torch.no_grad():
        expected = reference(tokens).logits
    for logits in ranks.run(train_layout, synced_logits, tmp_path, train_layout, layout, tokens):
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def before_and_after(
    _rank: int, first: Path, second: Path, layout: Layout, prompts: list[list[int]]
) -> tuple[Any, Any, Any]:
    """Completions with the first model's weights, then the second's, and of a cold copy."""
    sampling = Sampling(temperature=1.0, max_new_tokens=8, seed=3)
    model = trained_model(first, layout)
    generator = generation_rank(first, layout, model.vocab_size)
    generator.sync([model], 1)
    before = generator.generate(prompts, range(len(prompts)), sampling)
    model.load_state_dict(trained_model(second, layout).state_dict())
    labelled_old = generator.generate(prompts, range(len(prompts)), sampling)
    assert labelled_old == before, "the copy must not see weights that were not synced"
    generator.sync([model], 2)
    after = generator.generate(prompts, range(len(prompts)), sampling)
    cold = generation_rank(second, layout, model.vocab_size)
    cold.sync([model], 2)
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
        generator.sync([model], 1)
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
    assert "word_embeddings.weight is [104, 32]" in vocabulary
    assert "[112, 32]" in vocabulary
    assert "no pipeline stages" in stages
