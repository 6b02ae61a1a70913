"""Generation through the ranks: equal to transformers, to the trainer, and over all layouts."""

from itertools import chain
from pathlib import Path

import pytest
import torch

from algorithms.protocols import Sampling
from megatron_backend.training.shares import gather_rows
from service.spec.layout import Layout
from tests.megatron_backend.generation.generation_runs import (
    generate_in_bf16,
    merged,
    ragged_prompts,
    sync_and_generate,
    trainer_log_probs,
)
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import CONFIGS, save_random

GREEDY = Sampling(temperature=0.0, max_new_tokens=12, seed=0)
SAMPLED = Sampling(temperature=1.0, max_new_tokens=12, seed=11)
COOL = Sampling(temperature=0.5, max_new_tokens=12, seed=11)
BF16_ROUNDING = 0.02


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_those_of_transformers(ranks: Ranks, tmp_path: Path, name: str) -> None:
    reference = save_random(name, tmp_path)
    prompts = ragged_prompts(1, 9, 17)
    [[completions]] = ranks.run(
        Layout(), sync_and_generate, tmp_path, Layout(), Layout(), prompts, [GREEDY]
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            min_new_tokens=12,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.token_ids == generated[0, len(prompt) :].tolist()
        with torch.no_grad():
            logits = reference(generated).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).max(-1).values
        assert torch.tensor(completion.log_probs) == pytest.approx(expected, abs=1e-4)
        assert (completion.stop_reason, completion.weight_version) == ("length", 7)


@pytest.mark.parametrize("sampling", [SAMPLED, COOL], ids=["t1", "t0.5"])
@pytest.mark.parametrize("name", ["llama3-tied", "qwen2", "qwen3-tied"])
def test_a13_a15_sampled_log_probs_are_the_trainers(
    ranks: Ranks, tmp_path: Path, name: str, sampling: Sampling
) -> None:
    save_random(name, tmp_path)
    prompts = ragged_prompts(3, 8, 8, 15)
    layout = Layout(tp=2)
    shares = ranks.run(
        layout, sync_and_generate, tmp_path, layout, Layout(dp=2), prompts, [sampling]
    )
    [completions] = merged(Layout(dp=2), shares)
    sequences = [
        [*prompt, *completion.token_ids]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    shares = ranks.run(layout, trainer_log_probs, tmp_path, layout, sequences, sampling.temperature)
    expected = gather_rows(layout, shares)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        own = expected[row, len(prompt) : len(sequences[row])]
        assert (torch.tensor(completion.log_probs) - own).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("train_layout", "layout"),
    [
        (Layout(tp=2), Layout(dp=2)),
        (Layout(tp=2), Layout(tp=2)),
        (Layout(pp=2), Layout(dp=2)),
        (Layout(pp=2), Layout(tp=2)),
        (Layout(dp=2), Layout(tp=2)),
        (Layout(dp=2), Layout(dp=2)),
    ],
    ids=lambda layout: str(layout).replace(" ", ""),
)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3"])
def test_draws_do_not_depend_on_the_layout(
    ranks: Ranks, tmp_path: Path, name: str, train_layout: Layout, layout: Layout
) -> None:
    save_random(name, tmp_path)
    prompts = [prompt for prompt in ragged_prompts(4, 9, 6) for _ in range(3)]
    samplings = [SAMPLED, GREEDY]
    alone = ranks.run(
        Layout(), sync_and_generate, tmp_path, Layout(), Layout(), prompts, samplings, [3, 50]
    )
    expected = merged(Layout(), alone)
    shares = ranks.run(
        train_layout, sync_and_generate, tmp_path, train_layout, layout, prompts, samplings, [3, 50]
    )
    found = merged(layout, shares)
    for one, other in zip(chain(*expected), chain(*found), strict=True):
        assert one.token_ids == other.token_ids
        assert one.stop_reason == other.stop_reason
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert len({tuple(one.token_ids) for one in expected[0][:3]}) > 1, "copies must differ"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {"num_key_value_heads": 1}),
        ("gemma2", {}),
        ("mixtral", {}),
    ],
    ids=["one-key-head", "one-normed-key-head", "norms-behind", "experts"],
)
def test_two_ranks_of_a_decoder_are_one(
    ranks: Ranks, tmp_path: Path, name: str, changes: dict[str, int]
) -> None:
    save_random(name, tmp_path, **changes)
    prompts, samplings = ragged_prompts(4, 9, 6), [SAMPLED, GREEDY]
    found = []
    for train_layout, layout in ((Layout(), Layout()), (Layout(dp=2), Layout(tp=2))):
        shares = ranks.run(
            train_layout, sync_and_generate, tmp_path, train_layout, layout, prompts, samplings
        )
        found.append(list(chain(*merged(layout, shares))))
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "gemma2", "mixtral"])
def test_in_bf16_log_probs_are_those_of_the_weights_but_for_rounding(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """Of the same weights in fp32, by transformers."""
    reference = save_random(name, tmp_path, initializer_range=0.05).bfloat16().float()
    prompts = ragged_prompts(3, 11, 7)
    [completions] = ranks.run(Layout(), generate_in_bf16, tmp_path, prompts, SAMPLED)
    for prompt, completion in zip(prompts, completions, strict=True):
        whole = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = reference(whole).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0]
        assert torch.tensor(completion.log_probs) == pytest.approx(expected, abs=BF16_ROUNDING)
