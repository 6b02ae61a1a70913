"""Layouts that are proposed: they fit, a submit accepts them, and they come in a good order."""

from typing import Any

import pytest

from service.spec import JobSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.validation.batch import check_batch, check_cuts
from service.validation.fit import check_fit, notes_of
from service.validation.layout import resolve_layout
from service.validation.memory import estimate
from service.validation.parameters import rank_parameters
from service.validation.planner import Machines, Proposal, Proposals, propose
from service.validation.problems import InvalidRequest
from service.validation.step_time import step_time
from tests.service.validation.jobs import EXPERTS, model, spec

LLAMA_8B = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
)
NODE = Machines(nodes=1, gpus_per_node=8, memory_gib=80)


def job(*, dtype: str = "bf16", online: bool = False, **training: Any) -> JobSpec:
    sizes = {"max_length": 4096, "global_batch_size": 64} | ({"steps": 1} if online else {})
    return spec(online=online, precision={"dtype": dtype}, training=sizes | training)


def assert_accepted(found: Proposal, config: ModelConfig) -> None:
    """As a submit would check it."""
    layout, problems = resolve_layout(found.spec)
    assert layout == found.layout
    problems += check_batch(found.spec, layout) + check_cuts(found.spec, layout)
    assert problems + check_fit(found.spec, layout, config) == []


@pytest.mark.parametrize(
    ("asked", "config", "machines"),
    [
        (job(), LLAMA_8B, NODE),
        (job(max_length=32768), LLAMA_8B, NODE),
        (job(online=True), LLAMA_8B, Machines(nodes=2, gpus_per_node=8, memory_gib=80)),
        (job(), LLAMA_8B, Machines(nodes=1, gpus_per_node=1, memory_gib=80)),
        (
            job(max_length=512, micro_batch_size=2),
            model(EXPERTS, hidden_size=512, moe_intermediate_size=512),
            Machines(nodes=1, gpus_per_node=4, memory_gib=8),
        ),
    ],
    ids=["dense", "long", "online", "one GPU", "experts"],
)
def test_what_is_proposed_fits_is_accepted_and_comes_in_order(
    asked: JobSpec, config: ModelConfig, machines: Machines
) -> None:
    found = propose(asked, config, machines)
    assert found.fitting
    assert found.smallest is None
    times = [one.time.total for one in found.fitting]
    assert times == sorted(times)
    assert len({str(one.layout) for one in found.fitting}) == len(found.fitting)
    for one in found.fitting:
        assert one.layout.world_size == machines.nodes * machines.gpus_per_node
        assert machines.gpus_per_node % one.layout.tp == 0
        assert one.memory.total <= machines.usable_bytes < machines.memory_gib * 2**30
        assert_accepted(one, config)
        stages = estimate(one.spec, config, one.layout)
        assert max(stage.resident for stage in stages) <= one.memory.total
        if one.memory.kv_cache:
            per_sequence = 2 * 32 * 8 * 128 * 2 * asked.training.max_length
            assert one.memory.kv_cache >= per_sequence
        assert "of the usable memory" in one.reason


def test_a_frozen_model_keeps_its_gpus_and_training_gets_the_rest() -> None:
    frozen = {"model": {"source": {"path": "rm"}, "layout": {"tp": 2, "dp": 2}}}
    asked = job(online=True)
    with_reward = JobSpec.model_validate(asked.model_dump(exclude_unset=True) | {"reward": frozen})
    found = propose(with_reward, LLAMA_8B, NODE)
    assert found.fitting
    for one in found.fitting:
        assert one.layout.world_size == 4
        assert_accepted(one, LLAMA_8B)
    assert propose(with_reward, LLAMA_8B, Machines(nodes=1, gpus_per_node=4, memory_gib=80)) == (
        Proposals(fitting=[], smallest=None)
    )


def test_a_critic_takes_more_memory_than_a_group() -> None:
    """A critic of eight billion parameters beside the policy: eight GPUs hold it less easily."""
    layout, sizes = Layout(tp=8, sequence_parallel=True), {"gpus_per_node": 8}
    base = {"precision": {"dtype": "bf16"}, "resources": sizes}
    (group,) = estimate(spec(online=True, **base), LLAMA_8B, layout)
    (critic,) = estimate(spec(online=True, **base, algorithm={"type": "ppo"}), LLAMA_8B, layout)
    parameters = rank_parameters(LLAMA_8B, layout, stage=0, head="value").total
    assert critic.critic == (2 + 4 + 12) * parameters
    assert critic.total == group.total + critic.critic + critic.reference_weights


def test_less_memory_means_more_savings_and_then_none() -> None:
    one_gpu = {"nodes": 1, "gpus_per_node": 1}
    (roomy,) = propose(job(), LLAMA_8B, Machines(**one_gpu, memory_gib=400)).fitting
    assert roomy.spec.training.recompute == "none"
    assert not roomy.spec.optimizer.offload
    (tight,) = propose(job(), LLAMA_8B, Machines(**one_gpu, memory_gib=180)).fitting
    assert tight.spec.training.recompute == "full"
    (tighter,) = propose(job(), LLAMA_8B, Machines(**one_gpu, memory_gib=80)).fitting
    assert tighter.spec.optimizer.offload
    assert tighter.time.total > tight.time.total > roomy.time.total
    nothing = propose(job(), LLAMA_8B, Machines(**one_gpu, memory_gib=24))
    assert nothing.fitting == []
    assert nothing.smallest is not None
    assert nothing.smallest.spec.optimizer.offload
    fp32 = propose(job(dtype="fp32"), LLAMA_8B, Machines(**one_gpu, memory_gib=24))
    assert fp32.smallest is not None
    assert not fp32.smallest.spec.optimizer.offload


def test_a_batch_that_no_layout_divides_leaves_nothing() -> None:
    machines = Machines(nodes=1, gpus_per_node=7, memory_gib=80)
    found = propose(job(), model(num_hidden_layers=1), machines)
    assert (found.fitting, found.smallest) == ([], None)


def test_formats_that_gpus_cannot_have_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bf16 only"):
        propose(job(dtype="fp32", online=True), LLAMA_8B, NODE)


def test_what_costs_time_on_paper() -> None:
    def cost(layout: Layout, **training: Any) -> float:
        asked = job(micro_batch_size=1, **training)
        return step_time(asked, LLAMA_8B, layout, gpus_per_node=8).total

    assert cost(Layout()) == 1.0
    assert cost(Layout(), recompute="full") == pytest.approx(4 / 3)
    # Four stages and 64 micro-batches: 3 of 64 are waiting; half of it with two chunks a stage.
    pipeline = Layout(pp=4)
    assert step_time(job(micro_batch_size=1), LLAMA_8B, pipeline, gpus_per_node=8).bubble == 3 / 64
    assert cost(Layout(pp=4, vpp=2)) < cost(pipeline)
    assert cost(Layout(tp=2)) < cost(Layout(tp=4)) < cost(Layout(tp=8))
    slow = step_time(job(), LLAMA_8B, Layout(tp=8), gpus_per_node=4)
    fast = step_time(job(), LLAMA_8B, Layout(tp=8), gpus_per_node=8)
    assert slow.tensor == pytest.approx(10 * fast.tensor)
    assert cost(Layout(dp=2)) > 1.0
    assert cost(Layout(cp=2)) > 1.0


def test_what_is_worth_knowing_of_an_accepted_job() -> None:
    gpus = {"gpus_per_node": 8}
    fp8 = {"dtype": "bf16", "fp8": {"recipe": "tensorwise"}}
    assert notes_of(spec(), Layout(), model(), None) == []
    (note,) = notes_of(spec(precision=fp8), Layout(), model(), None)
    assert "emulated on the CPU" in note
    (note,) = notes_of(spec(precision=fp8, resources=gpus), Layout(), model(), None)
    assert "needs compute capability 8.9" in note
    assert notes_of(spec(precision=fp8, resources=gpus), Layout(), model(), (9, 0)) == []
    (note,) = notes_of(spec(optimizer={"offload": True}), Layout(), model(), None)
    assert "changes nothing on the CPU" in note
    (note,) = notes_of(spec(), Layout(tp=8), model(), None)
    assert "4 tensor-parallel ranks share each KV head" in note
    (note,) = notes_of(spec(), Layout(pp=4), model(), None)
    assert "7 to 8 layers" in note
