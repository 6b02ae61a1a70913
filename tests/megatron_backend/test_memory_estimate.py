"""The planner's formulas against what a step really takes: weights, gradients, optimizer state and
activations, of real Megatron models on the CPU. All within 10%."""

from typing import Any

import pytest

from megatron_backend.training import log_probs
from service.spec import JobSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.validation import activations
from service.validation.memory import CPU_CACHE_BYTES, estimate
from service.validation.planner import CACHE_SHARE
from tests.megatron_backend.memory_runs import Weighed, engine_limits, weigh, weigh_sampling
from tests.megatron_backend.ranks import Ranks

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 304,
    "tie_word_embeddings": False,
}
QK_NORM: dict[str, Any] = {**DENSE, "model_type": "qwen3", "head_dim": 16}
GEMMA: dict[str, Any] = {
    **DENSE,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    **QK_NORM,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def job(*, dtype: str = "fp32", algorithm: str = "sft", **training: Any) -> JobSpec:
    sizes = {"global_batch_size": 16, "max_length": 64, "micro_batch_tokens": 256}
    return JobSpec.model_validate(
        {
            "name": "a",
            "model": {"path": "tiny"},
            "algorithm": {"type": algorithm},
            "data": {"train": "file-0123456789abcdef"},
            "training": sizes | training,
            "precision": {"dtype": dtype},
        }
    )


MODES = [job(), job(recompute="selective"), job(recompute="full")]
VALUE = job(algorithm="reward_model", global_batch_size=8)
"""A value head, on pairs; a critic is such a model too."""
DENSE_CASES = [(DENSE, mode) for mode in [*MODES, VALUE]] + [(QK_NORM, job())]
EXPERT_CASES = [(EXPERTS, mode) for mode in MODES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (
            Layout(),
            [
                *DENSE_CASES,
                *EXPERT_CASES,
                (DENSE, job(packing=False)),
                (DENSE, job(dtype="bf16")),
                (QK_NORM, job(dtype="bf16")),
                (GEMMA, job()),
                (GEMMA, job(dtype="bf16")),
            ],
        ),
        (Layout(tp=2), DENSE_CASES),
        (Layout(tp=2, sequence_parallel=True), DENSE_CASES + EXPERT_CASES),
        (Layout(pp=2), DENSE_CASES + EXPERT_CASES),
        (Layout(pp=2, vpp=2), DENSE_CASES),
        (Layout(dp=2), [(DENSE, job()), (DENSE, job(dtype="bf16"))]),
        (Layout(dp=2, ep=2), EXPERT_CASES),
        (Layout(cp=2), [(DENSE, job())]),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else f"{len(value)} cases",
)
def test_the_formulas_are_within_a_tenth_of_what_is_measured(
    ranks: Ranks, layout: Layout, cases: list[tuple[dict[str, Any], JobSpec]]
) -> None:
    measured: list[list[Weighed]] = ranks.run(layout, weigh, layout, cases)
    for index, (config, spec) in enumerate(cases):
        stages = estimate(spec, ModelConfig.from_hf(config), layout)
        for rank in range(layout.world_size):
            found, formula = measured[rank][index], stages[layout.coordinates(rank).pp]
            case = (str(layout), rank, config["model_type"], spec.training.recompute)
            assert formula.parameters == found.parameters, case
            assert formula.weights == found.weights, case
            for name in ("gradients", "optimizer", "activations"):
                ratio = getattr(formula, name) / getattr(found, name)
                assert 0.9 < ratio < 1.1, (name, ratio, *case)


@pytest.mark.parametrize("config", [DENSE, GEMMA, EXPERTS], ids=["dense", "gemma", "experts"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_what_sampling_takes_is_what_it_has(
    ranks: Ranks, layout: Layout, config: dict[str, Any]
) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "a",
            "model": {"path": "tiny"},
            "algorithm": {"type": "grpo", "group_size": 4},
            "environment": {"id": "tools/calculator"},
            "training": {"steps": 1, "global_batch_size": 16, "max_length": 64},
            "parallel": {"tp": layout.tp, "sequence_parallel": layout.sequence_parallel},
            "rollout": {"layout": {"tp": layout.tp}},
        }
    )
    (formula,) = estimate(spec, ModelConfig.from_hf(config), layout)
    for weights, packed, cache in ranks.run(layout, weigh_sampling, layout, config, spec):
        assert formula.rollout_weights == weights
        assert formula.packed_weights == packed
        assert formula.kv_cache == cache


def test_logits_are_cut_as_the_workers_cut_them() -> None:
    assert activations.CHUNK_BYTES == log_probs.CHUNK_BYTES
    assert activations.KEPT_BYTES == log_probs.KEPT_BYTES
    assert activations.LEAST_ROWS == log_probs._LEAST_ROWS


def test_the_engines_take_what_the_planner_gives_them(ranks: Ranks) -> None:
    assert ranks.run(Layout(), engine_limits) == [(CPU_CACHE_BYTES, CACHE_SHARE)]
