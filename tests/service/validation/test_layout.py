"""Layouts at submit: cases E01 (layers), E05 (KV heads), E06 (vocabulary), E09 (cuts)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.validation.layout import (
    check_layout,
    check_rollout,
    check_rollout_world,
    resolve_layout,
)
from service.validation.problems import FieldProblem
from tests.service.validation.jobs import DENSE, EXPERTS, model, spec


@pytest.mark.parametrize(
    ("parallel", "resources", "dp"),
    [
        ({}, {}, 1),
        ({"tp": 2, "dp": 3}, {}, 3),
        ({"tp": 2}, {"gpus_per_node": 8}, 4),
        ({"tp": 2, "pp": 2}, {"nodes": 3, "gpus_per_node": 4}, 3),
        ({"tp": 2, "cp": 2}, {"gpus_per_node": 8}, 2),
        ({"tp": 2, "dp": 4}, {"gpus_per_node": 8}, 4),
    ],
)
def test_dp_is_what_fills_the_gpus_and_1_on_the_cpu(
    parallel: dict[str, Any], resources: dict[str, Any], dp: int
) -> None:
    layout, problems = resolve_layout(spec(parallel=parallel, resources=resources))
    assert problems == []
    assert layout == Layout(**parallel | {"dp": dp})


@pytest.mark.parametrize(
    ("parallel", "resources", "field", "says", "fix"),
    [
        ({"tp": 3}, {"gpus_per_node": 8}, "parallel", "3 x 1 x 1", "lower tp, cp or pp"),
        ({"tp": 2, "cp": 8}, {"gpus_per_node": 8}, "parallel", "2 x 8 x 1", "lower tp, cp or pp"),
        ({"tp": 2, "dp": 2}, {"gpus_per_node": 8}, "parallel.dp", "for 8 GPUs", "set dp to 4"),
        ({"dp": 3}, {"nodes": 2}, "resources.nodes", "share 3 tensor", "divisor of 3"),
        ({"vpp": 2}, {}, "parallel.vpp", "pp is 1", "set vpp to 1, or pp above 1"),
        (
            {"sequence_parallel": True},
            {},
            "parallel.sequence_parallel",
            "tp is 1",
            "set it to false, or tp above 1",
        ),
        (
            {"pp": 2, "pipeline_layers": [3, 3, 3]},
            {},
            "parallel.pipeline_layers",
            "3 entries for pp = 2",
            "give 2 numbers",
        ),
        (
            {"pp": 2, "vpp": 2, "pipeline_layers": [3, 3]},
            {},
            "parallel.pipeline_layers",
            "chunks are all of one size",
            "set it to null, or vpp to 1",
        ),
        (
            {"ep": 4, "dp": 3, "cp": 2},
            {},
            "parallel.ep",
            "does not divide dp x cp = 3 x 2",
            "ep can be 1, 2, 3, 6",
        ),
    ],
)
def test_layouts_that_no_ranks_can_have_are_refused(
    parallel: dict[str, Any], resources: dict[str, Any], field: str, says: str, fix: str
) -> None:
    layout, (problem,) = resolve_layout(spec(parallel=parallel, resources=resources))
    assert layout is None
    assert_problem(problem, field, says, fix)


FROZEN: dict[str, Any] = {"model": {"source": {"path": "rm"}, "layout": {"tp": 2, "dp": 2}}}


def test_frozen_models_have_gpus_of_their_own() -> None:
    def resolved(gpus: int, **parallel: Any) -> tuple[Layout | None, list[FieldProblem]]:
        resources = {"gpus_per_node": gpus}
        return resolve_layout(
            spec(online=True, reward=FROZEN, parallel=parallel, resources=resources)
        )

    assert resolved(8) == (Layout(dp=4), [])
    assert resolved(8, tp=2, dp=2) == (Layout(tp=2, dp=2), [])
    _, (problem,) = resolved(4)
    assert problem.field == "resources.gpus_per_node"
    assert "of 1 x 4 GPUs none is left to train on: `reward.model` takes 4" in problem.message
    _, (problem,) = resolved(6, tp=4)
    assert "1 x 6 less the 4 of `reward.model` = 2 GPUs" in problem.message
    _, (problem,) = resolved(8, dp=8)
    assert problem.fix == "set dp to 4 or auto"
    # On the CPU any number of ranks shares the machine.
    assert resolve_layout(spec(online=True, reward=FROZEN, parallel={"dp": 3}))[0] == Layout(dp=3)


@pytest.mark.parametrize(
    ("layout", "config", "field", "says", "fix"),
    [
        (
            Layout(tp=5),
            model(num_key_value_heads=1, intermediate_size=100),
            "parallel.tp",
            "tp must divide num_attention_heads: tp = 5, num_attention_heads = 16",
            "tp can be 1, 2, 4, 8, 16",
        ),
        (
            Layout(tp=16),
            model(intermediate_size=40),
            "parallel.tp",
            "tp must divide intermediate_size: tp = 16, intermediate_size = 40",
            "tp can be 1, 2, 4, 5, 8, 10, 20, 40",
        ),
        (Layout(pp=31), model(), "parallel.pp", "30 layers cannot fill pp = 31", "at most 30"),
        (
            Layout(pp=2, vpp=2),
            model(),
            "parallel.vpp",
            "pp x vpp = 2 x 2 chunks do not divide the model's 30 layers",
            "with pp = 2, vpp can be 1, 3, 5, 15",
        ),
        (Layout(pp=4, vpp=2), model(), "parallel.vpp", "4 x 2", "vpp can be 1 only"),
        (
            Layout(pp=2, pipeline_layers=(16, 16)),
            model(),
            "parallel.pipeline_layers",
            "its sum is 32, but the model has 30 layers",
            "give 2 numbers whose sum is 30",
        ),
        (Layout(ep=2, dp=2), model(), "parallel.ep", "the model has none", "set ep to 1"),
        (
            Layout(ep=3, dp=3),
            model(EXPERTS),
            "parallel.ep",
            "ep = 3 does not divide the model's 8 experts",
            "ep can be 1, 2, 4, 8",
        ),
        (
            Layout(tp=32, sequence_parallel=True),
            model(EXPERTS, num_attention_heads=32),
            "parallel.tp",
            "tp must divide moe_intermediate_size: tp = 32, moe_intermediate_size = 48",
            "tp can be 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
        ),
        (
            Layout(tp=2),
            model(EXPERTS),
            "parallel.sequence_parallel",
            "tp = 2",
            "set sequence_parallel to true",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_layouts_that_the_model_cannot_have_are_refused(
    layout: Layout, config: ModelConfig, field: str, says: str, fix: str
) -> None:
    (problem,) = check_layout(layout, config)
    assert_problem(problem, field, says, fix)


def test_e01_layers_need_not_divide_and_each_is_in_one_stage() -> None:
    layout = Layout(pp=4)
    assert check_layout(layout, model()) == []
    stages = layout.stage_layers(30)
    assert [len(chunk) for stage in stages for chunk in stage] == [8, 8, 7, 7]
    assert [layer for stage in stages for chunk in stage for layer in chunk] == list(range(30))


def test_e05_kv_heads_fewer_than_tp_are_shared_and_others_refused_in_these_words() -> None:
    assert check_layout(Layout(tp=8), model()) == []
    (problem,) = check_layout(Layout(tp=4), model(num_attention_heads=12, num_key_value_heads=6))
    assert_problem(
        problem,
        "parallel.tp",
        "tp must divide num_key_value_heads or be a multiple of it: tp = 4, "
        "num_key_value_heads = 6",
        "tp can be 1, 2, 3, 6, 12",
    )


def test_e06_a_vocabulary_that_tp_does_not_divide_is_padded_not_refused() -> None:
    assert check_layout(Layout(tp=2), model()) == []


def test_the_sampling_layout_is_held_to_model_ranks_and_padded_vocabulary() -> None:
    assert check_rollout(Layout(), rollout_tp=4, model=model()) == []
    odd = {"intermediate_size": 100, "num_key_value_heads": 1, "vocab_size": 49920}
    (problem,) = check_rollout(Layout(), rollout_tp=5, model=model(**odd))
    assert_problem(problem, "rollout.layout.tp", "num_attention_heads", "tp can be 1, 2, 4")
    wide = model(vocab_size=101, num_attention_heads=16)
    (problem,) = check_rollout(Layout(), rollout_tp=16, model=wide)
    assert_problem(
        problem, "rollout.layout.tp", "training pads from 101 to 104 rows", "that divides 104"
    )
    assert check_rollout(Layout(tp=2), rollout_tp=16, model=wide) == []
    assert check_rollout_world(4, 8) == []
    (problem,) = check_rollout_world(4, 2)
    assert_problem(problem, "rollout.layout.tp", "the 2 ranks of the job", "it can be 1, 2")


def assert_problem(problem: FieldProblem, field: str, says: str, fix: str) -> None:
    assert problem.field == field
    assert says in problem.message
    assert problem.fix is not None
    assert fix in problem.fix


sizes = some.integers(min_value=1, max_value=6)


@settings(max_examples=400, deadline=None)
@given(
    tp=some.sampled_from([1, 2, 3, 4, 8]),
    pp=sizes,
    vpp=some.sampled_from([1, 1, 1, 2, 3]),
    cp=some.sampled_from([1, 2]),
    ep=some.sampled_from([1, 2, 3, 4]),
    dp=sizes,
    sequence_parallel=some.booleans(),
    stages=some.none() | some.lists(sizes, min_size=1, max_size=4),
    layers=some.integers(min_value=1, max_value=12),
    heads=some.sampled_from([(4, 2), (8, 8), (8, 1), (12, 6), (12, 4)]),
    ffn=some.sampled_from([48, 96, 100]),
    experts=some.none() | some.sampled_from([4, 6]),
)
def test_the_validator_accepts_what_the_workers_accept_and_nothing_else(
    tp: int,
    pp: int,
    vpp: int,
    cp: int,
    ep: int,
    dp: int,
    sequence_parallel: bool,
    stages: list[int] | None,
    layers: int,
    heads: tuple[int, int],
    ffn: int,
    experts: int | None,
) -> None:
    shape = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": ffn,
    }
    if experts is None:
        config = model(DENSE, **shape)
    else:
        config = model(EXPERTS, **shape, num_experts=experts, moe_intermediate_size=ffn)
    parallel = {
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "cp": cp,
        "ep": ep,
        "dp": dp,
        "sequence_parallel": sequence_parallel,
        "pipeline_layers": stages,
    }
    layout, problems = resolve_layout(spec(parallel=parallel))
    if layout is not None:
        problems = check_layout(layout, config)
    try:
        built = Layout.from_json(parallel)
        built.stage_layers(layers)
        config.check_layout(tp=tp, pp=pp, ep=ep)
        # Megatron's MoE layer refuses this at its first training step.
        accepted = experts is None or tp == 1 or sequence_parallel
    except ValueError:
        accepted = False
    assert accepted == (not problems), problems
    if accepted:
        assert layout == built
