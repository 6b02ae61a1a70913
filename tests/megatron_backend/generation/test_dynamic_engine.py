"""Megatron's dynamic engine behind our interface; only its CUDA kernels are replaced.

With five blocks the engine runs few requests at a time and evicts some; with 200 it runs all.
"""

from pathlib import Path

import pytest

from algorithms.protocols import Completion, Sampling
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.generation.generation_runs import ragged_prompts, trained_model
from tests.megatron_backend.ranks import Ranks
from tests.megatron_backend.small_models import read_config, save_random

SAMPLINGS = [
    Sampling(temperature=0.0, max_new_tokens=12, seed=0),
    Sampling(temperature=1.0, max_new_tokens=12, seed=11),
    Sampling(temperature=0.5, max_new_tokens=12, seed=11),
]


def both_engines(
    _rank: int, folder: Path, prompts: list[list[int]], stop: list[int], blocks: int
) -> list[tuple[list[Completion], list[Completion]]]:
    """The same calls to the CPU engine and to Megatron's, with memory for so many blocks."""
    from megatron.core.inference.utils import InferenceMode

    from megatron_backend.generation.cpu_engine import CpuEngine
    from megatron_backend.generation.dynamic_engine import DynamicEngine
    from tests.megatron_backend.generation.torch_flash_attention import installed

    model = trained_model(folder, Layout())
    sizes = {"stop_token_ids": stop, "max_length": 48}
    cpu = CpuEngine(model, ModelConfig.from_hf(read_config(folder)), **sizes)
    with installed():
        # A block of 16 tokens takes 3 layers * 2 KV heads * 8 * 2 * 4 bytes * 16.
        dynamic = DynamicEngine(
            model, vocabulary_size=101, **sizes, memory_bytes=blocks * 6144, block_tokens=16
        )
        assert not InferenceMode.is_active()
        answers = []
        for sampling in SAMPLINGS:
            places = range(100, 100 + len(prompts))
            expected = cpu.generate(prompts, places, sampling, weight_version=3)
            found = dynamic.generate(prompts, places, sampling, weight_version=3)
            answers.append((expected, found))
        assert not InferenceMode.is_active()
    return answers


@pytest.mark.parametrize("stop", [[], [5], [5, 17, 80, 99, 40, 41, 42]], ids=len)
@pytest.mark.parametrize("blocks", [200, 5], ids=["roomy", "tight"])
def test_megatrons_engine_gives_the_cpu_engines_tokens(
    ranks: Ranks, tmp_path: Path, stop: list[int], blocks: int
) -> None:
    save_random("qwen2-tied", tmp_path)
    prompts = [*ragged_prompts(3, 9, 30, 17), *ragged_prompts(20) * 4, *ragged_prompts(44)]
    [answers] = ranks.run(Layout(), both_engines, tmp_path, prompts, stop, blocks)
    for expected, found in answers:
        for one, other in zip(expected, found, strict=True):
            assert other.token_ids == one.token_ids
            assert other.stop_reason == one.stop_reason
            assert other.log_probs == pytest.approx(one.log_probs, abs=1e-4)
            assert other.weight_version == 3
