"""Memory by hand: one small layer, counted on paper."""

from typing import Any

import pytest

from service.spec.layout import Layout
from service.validation.activations import chunks_in_flight, forward_tokens
from service.validation.memory import CPU_CACHE_BYTES, StageMemory, estimate
from service.validation.parameters import rank_parameters
from tests.service.validation.jobs import EXPERTS, spec
from tests.service.validation.jobs import model as read

# One layer: q 8x8 + k,v 2 x 4x8 + o 8x8 = 192, biases 8 + 4 + 4 = 16, MLP 3 x 8 x 16 = 384,
# norms 2 x 8 = 16: 608. Vocabulary 30 is padded to 32 (tp 1) or 32 (tp 2): 32 x 8 = 256.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 30,
    "max_position_embeddings": 4096,
}
SHAPE = read(**SIZES)


def test_one_rank_holds_everything() -> None:
    (rank,) = estimate(spec(), SHAPE, Layout())
    parameters = 2 * 608 + 256 + 8
    assert SHAPE.layer_parameters == 608
    assert rank.parameters == parameters
    assert rank.weights == 4 * parameters
    assert rank.gradients == 4 * parameters
    assert rank.optimizer == 8 * parameters
    assert rank.resident == 16 * parameters
    assert rank.total == rank.resident + rank.activations + rank.logits


def test_tp_splits_matrices_and_not_norms() -> None:
    (rank,) = estimate(spec(), SHAPE, Layout(tp=2))
    assert rank.parameters == 2 * ((608 - 16) // 2 + 16) + 128 + 8


def test_pp_gives_the_last_stage_its_own_copy_of_a_tied_embedding() -> None:
    first, last = estimate(spec(), SHAPE, Layout(pp=2))
    assert first.parameters == 608 + 256
    assert last.parameters == 608 + 8 + 256


def test_dp_divides_the_optimizer_only() -> None:
    (alone,), (rank,) = estimate(spec(), SHAPE, Layout()), estimate(spec(), SHAPE, Layout(dp=4))
    assert (rank.weights, rank.gradients) == (alone.weights, alone.gradients)
    assert rank.optimizer == alone.optimizer // 4


def test_bf16_halves_weights_and_keeps_a_master_copy() -> None:
    (rank,) = estimate(spec(precision={"dtype": "bf16"}), SHAPE, Layout())
    assert rank.weights == 2 * rank.parameters
    assert rank.optimizer == 12 * rank.parameters


def test_sampling_and_a_reference_cost_a_copy_each() -> None:
    online = {
        "algorithm": {"type": "grpo", "kl_coef": 0.1},
        "environment": {"id": "tools/calculator"},
        "data": None,
        "training": {"steps": 1},
        "parallel": {"tp": 2},
    }
    (rank,) = estimate(spec(**online), SHAPE, Layout())
    assert rank.rollout_weights == 4 * (2 * 608 + 256 + 8)  # rollout.layout.tp is 1
    assert rank.reference_weights == rank.weights


EXPERT_SIZES = SIZES | {"num_experts": 4, "moe_intermediate_size": 6}
MIXTURE = read(EXPERTS, **EXPERT_SIZES)


def test_experts_are_spread_over_ep_and_their_state_over_fewer_ranks() -> None:
    # Attention 192, router 4 x 8, norms 16 and head norms 4; an expert is 3 x 8 x 6 = 144.
    shared, expert = 2 * (192 + 32 + 20) + 256 + 8, 144
    whole = rank_parameters(MIXTURE, Layout(), stage=0)
    assert (whole.dense, whole.experts) == (shared, 2 * 4 * expert)
    half = rank_parameters(MIXTURE, Layout(dp=4, ep=2), stage=0)
    assert (half.dense, half.experts) == (shared, 2 * 2 * expert)
    (rank,) = estimate(spec(), MIXTURE, Layout(dp=4, ep=2))
    assert rank.optimizer == 8 * shared // 4 + 8 * 2 * 2 * expert // 2
    assert whole.total == MIXTURE.parameters + 2 * 8  # the vocabulary's padding


def test_context_parallel_ranks_share_the_optimizer_too() -> None:
    (rank,) = estimate(spec(), SHAPE, Layout(dp=2, cp=2))
    assert rank.optimizer == 8 * rank.parameters // 4


def test_chunks_of_virtual_stages_count_together() -> None:
    deep = read(**SIZES | {"num_hidden_layers": 4})
    first, last = estimate(spec(), deep, Layout(pp=2, vpp=2))
    assert first.parameters == 2 * 608 + 256
    assert last.parameters == 2 * 608 + 8 + 256


def test_fp8_and_offload_change_what_a_gpu_holds_and_nothing_on_the_cpu() -> None:
    def rank(gpus: int, *, offload: bool = False, **fp8: Any) -> StageMemory:
        precision = {"dtype": "bf16", "fp8": fp8 or None}
        asked = spec(
            precision=precision,
            optimizer={"offload": offload},
            resources={"gpus_per_node": gpus},
        )
        return estimate(asked, SHAPE, Layout())[0]

    matrices = 2 * (608 - 16)
    assert rank(1, recipe="tensorwise").weights == rank(1).weights + 2 * matrices
    assert rank(1, recipe="tensorwise", params_in_fp8=True).weights == rank(1).weights
    assert rank(0, recipe="tensorwise").weights == rank(0).weights
    assert rank(1, offload=True).optimizer == 0
    assert rank(0, offload=True).optimizer == rank(0).optimizer > 0


def test_keys_and_values_of_all_sequences_and_no_more_than_the_cpu_engine_takes() -> None:
    training = {"steps": 1, "max_length": 64, "global_batch_size": 32}
    per_token = 2 * 2 * 2 * 2 * 4  # keys and values, layers, KV heads, head_dim, fp32
    (rank,) = estimate(spec(online=True, training=training), SHAPE, Layout(dp=2))
    assert rank.kv_cache == 16 * 64 * per_token
    assert rank.total == rank.resident + max(rank.activations + rank.logits, rank.kv_cache)
    huge = training | {"max_length": 4096, "global_batch_size": 2**16}
    (rank,) = estimate(spec(online=True, training=huge), SHAPE, Layout())
    assert rank.kv_cache == CPU_CACHE_BYTES
    assert estimate(spec(), SHAPE, Layout())[0].kv_cache == 0


@pytest.mark.parametrize(
    ("training", "layout", "tokens"),
    [
        ({"max_length": 100}, Layout(), 6400),  # all 64 rows are less than the budget
        ({"max_length": 1000}, Layout(), 16384),
        ({"max_length": 20000}, Layout(), 20000),  # a longer sequence goes alone
        ({"max_length": 1000, "micro_batch_size": 3}, Layout(), 3000),
        ({"max_length": 1000, "micro_batch_size": 3, "global_batch_size": 2}, Layout(), 2000),
        ({"max_length": 1001, "micro_batch_size": 1}, Layout(cp=2), 1004),
    ],
)
def test_the_tokens_of_a_forward_pass(
    training: dict[str, Any], layout: Layout, tokens: int
) -> None:
    assert forward_tokens(spec(training=training), layout) == tokens


def test_how_many_forward_passes_wait_for_their_backward_pass() -> None:
    def flights(layout: Layout, micro_batches: int | None = None) -> list[int]:
        return [
            chunks_in_flight(layout, stage=stage, micro_batches=micro_batches)
            for stage in range(layout.pp)
        ]

    assert flights(Layout()) == [1]
    assert flights(Layout(pp=4)) == [4, 3, 2, 1]
    assert flights(Layout(pp=4), micro_batches=2) == [2, 2, 2, 1]
    assert flights(Layout(pp=2, vpp=2)) == [5, 3]
    assert flights(Layout(pp=2, vpp=2), micro_batches=2) == [4, 3]


def test_recomputation_keeps_less_and_only_the_last_stage_has_logits() -> None:
    kept = [
        estimate(spec(training={"recompute": mode}), SHAPE, Layout())[0].activations
        for mode in ("none", "full")
    ]
    assert kept[0] > kept[1]
    first, last = estimate(spec(), SHAPE, Layout(pp=2))
    assert first.logits == 0 < last.logits
