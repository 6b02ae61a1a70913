"""Memory by hand: one small layer, counted on paper."""

from typing import Any

import pytest

from megatron_backend.models.vocabulary import padded_vocab_size
from megatron_backend.training import log_probs
from service.spec.layout import Layout
from service.validation import activations
from service.validation.activations import chunks_in_flight, forward_tokens
from service.validation.memory import CPU_CACHE_BYTES, estimate
from service.validation.parameters import padded_vocabulary, rank_parameters
from tests.service.validation.jobs import model as read
from tests.service.validation.jobs import spec

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


def test_the_padding_is_that_of_the_workers() -> None:
    for size in (1, 30, 1000, 1023, 1024, 50257, 151936):
        for tp in (1, 2, 4, 8):
            assert padded_vocabulary(size, tp) == padded_vocab_size(size, tp=tp)
