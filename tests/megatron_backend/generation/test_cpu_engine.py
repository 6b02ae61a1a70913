"""The CPU engine's batches: neighbours, splits, stop tokens, bounds, and what is not computed."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.protocols import Completion, Sampling
from megatron_backend.generation.matrices import can_pack
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.generation.generation_runs import ragged_prompts, trained_model
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import read_config, save_random

SAMPLED = Sampling(temperature=1.0, max_new_tokens=16, seed=4)
GREEDY = Sampling(temperature=0.0, max_new_tokens=16, seed=4)
# A row of 40 slots takes 3 layers * 2 KV heads * 8 * 2 * 4 bytes * 40 and 104 * 32 for its logits.
TWO_ROWS = 2 * (384 * 40 + 3328)


def engine(folder: Path, stop: Sequence[int] = (), **options: Any) -> Any:
    """An engine on the model itself."""
    from megatron_backend.generation.cpu_engine import CpuEngine

    return CpuEngine(
        trained_model(folder, Layout()),
        ModelConfig.from_hf(read_config(folder)),
        stop_token_ids=stop,
        max_length=64,
        **options,
    )


def several_ways(
    _rank: int, folder: Path, prompts: list[list[int]]
) -> list[tuple[list[Completion], list[Completion]]]:
    """The same sampling all at once, in small batches, and one prompt at a time, backwards."""
    large, small = engine(folder, [3, 50]), engine(folder, [3, 50], memory_bytes=TWO_ROWS)
    places = list(range(len(prompts)))
    answers = []
    for sampling in (SAMPLED, GREEDY):
        whole = large.generate(prompts, places, sampling, weight_version=1)
        split = small.generate(prompts, places, sampling, weight_version=1)
        single = [
            large.generate([prompts[i]], [i], sampling, weight_version=1)[0] for i in places[::-1]
        ]
        answers += [(whole, split), (whole, single[::-1])]
    return answers


def test_neighbours_and_batch_splits_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    save_random("qwen2-tied", tmp_path)
    prompts = [p for p in ragged_prompts(2, 20, 7, 11) for _ in range(4)]
    [answers] = ranks.run(Layout(), several_ways, tmp_path, prompts)
    for whole, other in answers:
        for one, two in zip(whole, other, strict=True):
            assert one.token_ids == two.token_ids
            assert one.stop_reason == two.stop_reason
            assert one.log_probs == pytest.approx(two.log_probs, abs=1e-4)


def without_onednn(
    _rank: int, folder: Path, prompts: list[list[int]]
) -> list[tuple[list[Completion], list[Completion]]]:
    """The same sampling with packed matrices, and as a torch without oneDNN does it."""

    def answers() -> list[list[Completion]]:
        places = range(len(prompts))
        return [
            engine(folder).generate(prompts, places, sampling, weight_version=1)
            for sampling in (SAMPLED, GREEDY)
        ]

    packed = answers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_backend.generation.matrices.can_pack", lambda: False)
        plain = answers()
    return list(zip(packed, plain, strict=True))


@pytest.mark.parametrize("model", ["qwen2-tied", "gemma2", "mixtral"])
def test_a_torch_without_onednn_gives_the_same(model: str, ranks: Ranks, tmp_path: Path) -> None:
    if not can_pack():
        pytest.skip("this torch was built without oneDNN")
    save_random(model, tmp_path)
    [answers] = ranks.run(Layout(), without_onednn, tmp_path, ragged_prompts(2, 20, 7))
    for packed, plain in answers:
        for one, two in zip(packed, plain, strict=True):
            assert one.token_ids == two.token_ids
            assert one.log_probs == pytest.approx(two.log_probs, abs=1e-4)


def with_stops(
    _rank: int, folder: Path, prompts: list[list[int]], stop: list[int]
) -> tuple[list[Completion], list[Completion]]:
    """The same draws without and with stop tokens."""
    places = range(len(prompts))
    return (
        engine(folder).generate(prompts, places, SAMPLED, weight_version=1),
        engine(folder, stop).generate(prompts, places, SAMPLED, weight_version=1),
    )


def test_a_completion_ends_with_the_first_of_several_stop_tokens(
    ranks: Ranks, tmp_path: Path
) -> None:
    save_random("qwen2-tied", tmp_path)
    stop = [5, 17, 80, 99]
    prompts = ragged_prompts(*range(1, 41))
    [(free, stopped)] = ranks.run(Layout(), with_stops, tmp_path, prompts, stop)
    reasons = set()
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.token_ids) if token in stop]
        length = ends[0] + 1 if ends else 16
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.log_probs == pytest.approx(whole.log_probs[:length], abs=1e-4)
        assert cut.stop_reason == ("stop" if ends else "length")
        reasons.add(cut.stop_reason)
    assert reasons == {"stop", "length"}


def at_the_bound(_rank: int, folder: Path, prompts: list[list[int]]) -> list[Completion]:
    """Sampling with little room left."""
    return engine(folder).generate(prompts, range(len(prompts)), SAMPLED, weight_version=1)


def test_no_sequence_grows_beyond_the_longest(ranks: Ranks, tmp_path: Path) -> None:
    save_random("qwen2-tied", tmp_path)
    [completions] = ranks.run(Layout(), at_the_bound, tmp_path, ragged_prompts(63, 60, 48, 30))
    assert [len(one.token_ids) for one in completions] == [1, 4, 16, 16]
    assert {one.stop_reason for one in completions} == {"length"}


def observed(
    _rank: int, folder: Path, prompts: list[list[int]], stop: list[int]
) -> tuple[list[int], list[int], list[Completion]]:
    """Prompt tokens that were prefilled, rows of each step, and the completions."""
    from megatron_backend.generation.cached_decoder import CachedDecoder

    class Counting(CachedDecoder):
        def prefill(self, tokens: Tensor, padding: Tensor) -> Any:
            prefilled.append(tokens.numel())
            return super().prefill(tokens, padding)

        def step(self, tokens: Tensor, cache: Any) -> Tensor:
            steps.append(len(tokens))
            return super().step(tokens, cache)

    prefilled: list[int] = []
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_backend.generation.cpu_engine.CachedDecoder", Counting)
        completions = engine(folder, stop).generate(
            prompts, range(len(prompts)), SAMPLED, weight_version=1
        )
    return prefilled, steps, completions


def test_groups_are_prefilled_once_and_finished_rows_leave(ranks: Ranks, tmp_path: Path) -> None:
    save_random("qwen2-tied", tmp_path)
    prompts = [p for p in ragged_prompts(10, 10, 10) for _ in range(8)]
    stop = list(range(0, 101, 8))
    [(prefilled, steps, completions)] = ranks.run(Layout(), observed, tmp_path, prompts, stop)
    assert sum(prefilled) == 3 * 10
    alive = [
        sum(len(one.token_ids) > step + 1 for one in completions) for step in range(len(steps))
    ]
    assert min(alive) < 12, "the stop tokens must end most rows early"
    for rows, needed in zip(steps, alive, strict=True):
        assert needed <= rows < needed / 0.75 + 1
    assert all(later <= earlier for earlier, later in pairwise(steps))
    assert max(len(one.token_ids) for one in completions) == len(steps) + 1


def not_finite(_rank: int, folder: Path) -> str:
    """What is said when the weights have diverged."""
    from megatron_backend.generation.cpu_engine import CpuEngine

    model = trained_model(folder, Layout())
    with torch.no_grad():
        model.decoder.layers[1].mlp.linear_fc2.weight.fill_(torch.nan)
    config = ModelConfig.from_hf(read_config(folder))
    broken = CpuEngine(model, config, stop_token_ids=[], max_length=64)
    with pytest.raises(FloatingPointError) as caught:
        broken.generate([[1, 2]], [0], SAMPLED, weight_version=1)
    return str(caught.value)


def test_diverged_weights_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    save_random("qwen2-tied", tmp_path)
    [said] = ranks.run(Layout(), not_finite, tmp_path)
    assert "weights have diverged" in said


def refusals(_rank: int, folder: Path) -> list[str]:
    """What is said of models that have a parameter or a module more than the decoder computes."""
    said = []
    for change in (
        lambda layer: layer.register_parameter("gain", torch.nn.Parameter(torch.ones(1))),
        lambda layer: layer.add_module("adapter", torch.nn.Linear(2, 2)),
    ):
        changed = engine(folder)
        change(changed._model.decoder.layers[2])
        with pytest.raises(NotImplementedError) as caught:
            changed.generate([[1, 2]], [0], SAMPLED, weight_version=1)
        said.append(str(caught.value))
    return said


def test_what_the_decoder_does_not_know_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    save_random("qwen2-tied", tmp_path)
    [(parameter, module)] = ranks.run(Layout(), refusals, tmp_path)
    assert "does not know the parameter decoder.layers.2.gain" in parameter
    assert "does not know Linear (decoder.layers.2.adapter)" in module
