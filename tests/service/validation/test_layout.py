"""Layouts, batches and lengths: cases E01 (layers), E05 (KV heads), E06 (vocabulary) at submit."""

from typing import Any

import pytest

from service.spec import JobSpec
from service.validation.batch import check_batch, check_lengths, check_schedule
from service.validation.layout import check_layout, check_rollout_world, resolve_dp
from service.validation.model_shape import ModelShape

SHAPE = ModelShape(
    family="qwen2",
    layers=30,
    hidden=64,
    intermediate=96,
    heads=16,
    kv_heads=2,
    head_dim=4,
    vocabulary=50257,
    positions=512,
    tied=True,
)


def spec(**parts: Any) -> JobSpec:
    online = parts.pop("online", False)
    base: dict[str, Any] = {"name": "a", "model": {"path": "tiny"}}
    if online:
        base |= {
            "algorithm": {"type": "grpo", "group_size": 8},
            "environment": {"id": "tools/calculator"},
            "training": {"steps": 3},
        }
    else:
        base |= {"algorithm": {"type": "sft"}, "data": {"train": "file-0123456789abcdef"}}
    return JobSpec.model_validate(base | parts)


@pytest.mark.parametrize(
    ("parallel", "resources", "dp"),
    [
        ({}, {}, 1),
        ({"tp": 2, "dp": 3}, {}, 3),
        ({"tp": 2}, {"gpus_per_node": 8}, 4),
        ({"tp": 2, "pp": 2}, {"nodes": 3, "gpus_per_node": 4}, 3),
        ({"tp": 2, "dp": 4}, {"gpus_per_node": 8}, 4),
    ],
)
def test_dp_is_what_fills_the_gpus_and_1_on_the_cpu(
    parallel: dict[str, Any], resources: dict[str, Any], dp: int
) -> None:
    assert resolve_dp(spec(parallel=parallel, resources=resources)) == (dp, [])


@pytest.mark.parametrize(
    ("parallel", "resources", "field"),
    [
        ({"tp": 3}, {"gpus_per_node": 8}, "parallel"),
        ({"tp": 16}, {"gpus_per_node": 8}, "parallel"),
        ({"tp": 2, "dp": 2}, {"gpus_per_node": 8}, "parallel.dp"),
        ({}, {"nodes": 2}, "resources.nodes"),
    ],
)
def test_layouts_that_do_not_fill_the_world_are_refused(
    parallel: dict[str, Any], resources: dict[str, Any], field: str
) -> None:
    dp, (problem,) = resolve_dp(spec(parallel=parallel, resources=resources))
    assert dp is None
    assert problem.field == field
    assert problem.fix


def test_e01_layers_that_pp_does_not_divide_are_refused() -> None:
    (problem,) = check_layout(spec(parallel={"pp": 4}), SHAPE)
    assert problem.field == "parallel.pp"
    assert "30 layers" in problem.message
    assert problem.fix == "pp can be 1, 2, 3, 5, 6, 10, 15, 30"


def test_e05_fewer_kv_heads_than_tp_are_refused_in_these_words() -> None:
    (problem,) = check_layout(spec(parallel={"tp": 8}), SHAPE)
    assert problem.field == "parallel.tp"
    assert "tp must divide num_key_value_heads" in problem.message
    assert problem.fix == "tp can be 1, 2"


def test_e06_a_vocabulary_that_tp_does_not_divide_is_padded_not_refused() -> None:
    assert check_layout(spec(parallel={"tp": 2}), SHAPE) == []


def test_heads_and_intermediate_size_are_checked_too() -> None:
    problems = check_layout(spec(parallel={"tp": 5}), SHAPE)
    named = [p.message.split(":")[0] for p in problems]
    assert named == [
        "tp must divide num_attention_heads",
        "tp must divide num_key_value_heads",
        "tp must divide intermediate_size",
    ]


def test_the_sampling_layout_is_checked_where_the_job_samples() -> None:
    layout = {"layout": {"tp": 4}}
    assert check_layout(spec(rollout=layout), SHAPE) == []
    problems = check_layout(spec(rollout=layout, online=True), SHAPE)
    assert {p.field for p in problems} == {"rollout.layout.tp"}
    assert check_rollout_world(spec(rollout=layout, online=True), 8) == []
    (problem,) = check_rollout_world(spec(rollout=layout, online=True), 2)
    assert problem.field == "rollout.layout.tp"
    assert problem.fix == "it can be 1, 2"


@pytest.mark.parametrize(
    ("training", "dp", "online", "fix"),
    [
        ({"global_batch_size": 7}, 2, False, "as 8"),
        ({"global_batch_size": 8, "micro_batch_size": 3}, 2, False, "as 12"),
        ({"global_batch_size": 12, "steps": 1}, 2, True, "as 16"),
    ],
)
def test_batches_that_do_not_divide_are_refused(
    training: dict[str, Any], dp: int, online: bool, fix: str
) -> None:
    (problem,) = check_batch(spec(training=training, online=online), dp)
    assert problem.field == "training.global_batch_size"
    assert problem.fix is not None
    assert fix in problem.fix


def test_batches_that_divide_are_accepted() -> None:
    fits = spec(training={"global_batch_size": 24, "micro_batch_size": 4, "steps": 1}, online=True)
    assert check_batch(fits, 3) == []


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    (problem,) = check_lengths(spec(training={"max_length": 513}), SHAPE)
    assert (problem.field, problem.fix) == ("training.max_length", "use at most 512")
    assert check_lengths(spec(training={"max_length": 512}), SHAPE) == []


def test_new_tokens_must_leave_room_for_the_question() -> None:
    training = {"max_length": 64, "steps": 1}
    too_many = spec(training=training, rollout={"max_new_tokens": 64}, online=True)
    (problem,) = check_lengths(too_many, SHAPE)
    assert problem.field == "rollout.max_new_tokens"
    assert check_lengths(spec(training=training, rollout={"max_new_tokens": 64}), SHAPE) == []


def test_a_warm_up_longer_than_the_job_is_refused() -> None:
    (problem,) = check_schedule(spec(training={"steps": 5}, optimizer={"warmup_steps": 6}))
    assert problem.field == "optimizer.warmup_steps"
    assert check_schedule(spec(optimizer={"warmup_steps": 6})) == []
