"""Memory by hand: one small layer, counted on paper."""

from typing import Any

import pytest

from service.spec import FrozenLayout, JobSpec
from service.spec.layout import Layout
from service.validation.activations import (
    chunks_in_flight,
    estimate_reading,
    forward_tokens,
    micro_batches,
)
from service.validation.memory import CPU_CACHE_BYTES, StageMemory, estimate, estimate_frozen
from service.validation.parameters import model_parameters, rank_parameters
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
RECOMPUTED = {"recompute": "full", "steps": 1}


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


def test_while_it_samples_on_a_cpu_in_fp32_matrices_are_there_twice() -> None:
    (rank,) = estimate(spec(online=True), SHAPE, Layout())
    assert rank.packed_weights == 4 * (2 * (608 - 16) + 256)  # without norms; a tied output too
    while_sampling = rank.packed_weights + rank.kv_cache
    assert rank.total == rank.resident + max(while_sampling, rank.activations + rank.logits)
    (half,) = estimate(spec(online=True, precision={"dtype": "bf16"}), SHAPE, Layout())
    assert half.packed_weights == 0
    assert estimate(spec(), SHAPE, Layout())[0].packed_weights == 0


VALUE = 2 * 608 + 256 + 8 + 8
"""Parameters of the model with a value head: layers, embedding, last norm, head."""


def test_a_reward_model_has_a_vector_in_the_place_of_its_output_layer() -> None:
    job = spec(algorithm={"type": "reward_model"})
    (rank,) = estimate(job, SHAPE, Layout())
    assert (rank.parameters, rank.logits) == (VALUE, 0)
    assert rank.total == rank.resident + rank.activations
    untied = read(**SIZES | {"tie_word_embeddings": False})
    assert estimate(job, untied, Layout())[0].parameters == VALUE
    assert model_parameters(untied, "value") == 2 * 608 + 30 * 8 + 8 + 8
    assert model_parameters(untied, "vocabulary") - model_parameters(untied, "value") == 30 * 8 - 8
    # The head is whole on each rank of the last stage, and the embedding is on the first alone.
    first, last = estimate(job, SHAPE, Layout(tp=2, pp=2))
    layer = (608 - 16) // 2 + 16
    assert (first.parameters, last.parameters) == (layer + 128, layer + 8 + 8)


def ppo(**algorithm: Any) -> JobSpec:
    return spec(online=True, algorithm={"type": "ppo", "kl_coef": 0.0, **algorithm})


def test_a_critic_is_a_second_trained_model_without_logits() -> None:
    (rank,) = estimate(ppo(), SHAPE, Layout())
    assert rank.critic == (4 + 4 + 8) * VALUE
    (alone,) = estimate(spec(online=True), SHAPE, Layout())
    assert alone.critic == 0
    assert rank.resident == alone.resident + rank.critic
    # Their steps come one after the other, so activations count once.
    assert (rank.activations, rank.logits) == (alone.activations, alone.logits)
    (shared,) = estimate(ppo(), SHAPE, Layout(dp=4))
    assert shared.critic == (4 + 4) * VALUE + 8 * VALUE // 4
    (reference,) = estimate(ppo(kl_coef=0.1), SHAPE, Layout())
    assert reference.reference_weights == 4 * (2 * 608 + 256 + 8)


def test_a_preference_keeps_a_reference_and_reads_pairs() -> None:
    training = {"max_length": 100, "global_batch_size": 8}
    pairs = spec(algorithm={"type": "dpo"}, training=training)
    assert estimate(pairs, SHAPE, Layout())[0].reference_weights == 4 * (2 * 608 + 256 + 8)
    # Eight pairs are sixteen sequences, and of micro-batches of one sequence a pair is the least.
    assert forward_tokens(pairs, Layout()) == 1600
    assert forward_tokens(pairs, Layout(dp=4)) == 400
    each = spec(algorithm={"type": "dpo"}, training=training | {"micro_batch_size": 1})
    assert forward_tokens(each, Layout()) == 200
    assert micro_batches(each, Layout(dp=2)) == 4
    long = spec(algorithm={"type": "dpo"}, training={"max_length": 20000})
    assert forward_tokens(long, Layout()) == 40000
    dealt = spec(
        online=True,
        algorithm={"type": "ppo", "mini_batches": 4},
        training=training | {"steps": 1, "micro_batch_size": 1},
    )
    assert micro_batches(dealt, Layout(dp=2)) == 1


def test_frozen_models_hold_weights_and_read() -> None:
    job = spec(online=True)
    first, last = estimate_frozen(job, SHAPE, FrozenLayout(pp=2), head="value")
    assert (first.parameters, last.parameters) == (608 + 256, 608 + 8 + 8)
    assert (first.weights, last.logits) == (4 * first.parameters, 0)
    assert first.total == first.weights + first.activations
    (teacher,) = estimate_frozen(job, SHAPE, FrozenLayout(), head="vocabulary")
    assert teacher.parameters == 2 * 608 + 256 + 8
    tokens = forward_tokens(job, Layout())
    assert teacher.logits == 2 * tokens * 32 * 4  # two chunks, each of all tokens here
    (full,) = estimate(spec(online=True, training=RECOMPUTED), SHAPE, Layout())
    # A layer's inputs are not kept: one layer works at a time.
    assert teacher.activations < full.activations
    (deep,) = estimate_frozen(
        job, read(**SIZES | {"num_hidden_layers": 8}), FrozenLayout(), head="vocabulary"
    )
    assert deep.activations == teacher.activations
    halves = estimate_frozen(job, SHAPE, FrozenLayout(dp=2), head="vocabulary")
    assert halves[0].weights == teacher.weights


def test_frozen_experts_split_the_sequence_with_their_matrices() -> None:
    """As they run: Megatron has experts under tensor parallelism in no other way."""
    job = spec(online=True)
    experts = read(EXPERTS)
    (teacher,) = estimate_frozen(job, experts, FrozenLayout(tp=2), head="vocabulary")
    split = Layout(tp=2, sequence_parallel=True)
    read_split = estimate_reading(job, experts, split, stage=0, cuda=False, head="vocabulary")
    assert (teacher.activations, teacher.logits) == read_split
    whole = estimate_reading(job, experts, Layout(tp=2), stage=0, cuda=False, head="vocabulary")
    assert teacher.activations < whole[0]


def test_sampled_answers_of_an_evaluation_have_keys_and_values() -> None:
    def cache(**evaluation: int) -> int:
        training = {"steps": 1, "max_length": 64, "global_batch_size": 8}
        job = spec(online=True, training=training, evaluation=evaluation)
        return estimate(job, SHAPE, Layout())[0].kv_cache

    assert cache(items=5, samples_per_item=4) == cache(items=20) == 20 * cache() // 8


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
