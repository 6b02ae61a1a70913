"""Layouts in which a job fits into the memory of given GPUs, the fastest first.

All layouts that the validator accepts are tried, each with as little recomputation and offload as
lets it fit, and ranked by `service.validation.step_time`. Tensor parallelism stays inside a node.
Sequence parallelism goes with it always, since it saves memory and costs nothing. A teacher or a
reward model keeps its own layout, and training gets the GPUs that it leaves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from service.spec import JobSpec, ParallelSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.validation.batch import check_batch, check_cuts
from service.validation.fit import check_fit
from service.validation.layout import (
    check_rollout_world,
    frozen_ranks,
    resolve_layout,
)
from service.validation.memory import StageMemory, cache_bytes_per_token, estimate
from service.validation.precision import check_formats
from service.validation.problems import InvalidRequest
from service.validation.step_time import StepTime, step_time

GIB = 1 << 30
RESERVED = 2 * GIB
"""Of each GPU: CUDA's context, collectives, workspaces."""
USABLE = 0.92
"""Of the rest; an allocator cannot use all."""
CACHE_SHARE = 0.25
"""Of what is free beside weights and optimizer, for the sampler's keys and values; see
`megatron_backend.generation.rank`."""
_LEAST_PIECE = 1024  # tokens of a sequence on one context-parallel rank: fewer are not worth it
_MOST_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """GPUs that a job could have."""

    nodes: int
    gpus_per_node: int
    memory_gib: float
    """Of one GPU."""

    @property
    def usable_bytes(self) -> int:
        """What a rank can fill."""
        return max(int((self.memory_gib * GIB - RESERVED) * USABLE), 1)


def gpu_gib(rank_bytes: int) -> float:
    """The memory of a GPU that a rank fills with so many bytes: see `usable_bytes`."""
    return (rank_bytes / USABLE + RESERVED) / GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A layout in which the job fits, or, of none that fits, the one that needs least."""

    spec: JobSpec
    """The job with this layout, recomputation, offload and machines."""
    layout: Layout
    memory: StageMemory
    """Of a rank in the fullest stage."""
    time: StepTime
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """What was found."""

    fitting: list[Proposal]
    """Fastest first."""
    smallest: Proposal | None
    """Where none fits: what comes closest; None where no layout is possible at all."""


def propose(spec: JobSpec, model: ModelConfig, machines: Machines, *, most: int = 5) -> Proposals:
    """Layouts for a job.

    Args:
        spec: its `parallel` and `resources` do not matter.
        machines: what it could have.
        most: how many layouts to give.

    Raises:
        InvalidRequest: the job's formats cannot go to any GPU.
    """
    base = _with(spec, machines, ParallelSpec())
    if problems := check_formats(base, None):
        raise InvalidRequest(problems)
    fitting: list[Proposal] = []
    smallest: Proposal | None = None
    for parallel in _layouts(spec, model, machines):
        asked = _with(spec, machines, parallel)
        layout, problems = resolve_layout(asked)
        if layout is None or problems or not _possible(asked, layout, model):
            continue
        for candidate in _savings(asked):
            found = _proposal(candidate, model, layout, machines)
            if found.memory.total <= machines.usable_bytes:
                fitting.append(found)
                break
            if smallest is None or found.memory.total < smallest.memory.total:
                smallest = found
    fitting.sort(key=lambda found: (found.time.total, found.memory.total))
    # Of layouts that differ in their virtual stages alone, one is enough.
    different = {replace(found.layout, vpp=1): found for found in reversed(fitting)}
    ranked = [found for found in fitting if different[replace(found.layout, vpp=1)] is found]
    return Proposals(fitting=ranked[:most], smallest=None if fitting else smallest)


def _with(spec: JobSpec, machines: Machines, parallel: ParallelSpec) -> JobSpec:
    size = {"nodes": machines.nodes, "gpus_per_node": machines.gpus_per_node}
    resources = spec.resources.model_copy(update=size)
    return spec.model_copy(update={"parallel": parallel, "resources": resources})


def _layouts(spec: JobSpec, model: ModelConfig, machines: Machines) -> Iterator[ParallelSpec]:
    gpus = machines.nodes * machines.gpus_per_node - frozen_ranks(spec)
    pieces = max(spec.training.max_length // _LEAST_PIECE, 1)
    experts = model.moe.num_experts if model.moe else 1
    for tp, cp, pp in product(
        _divisors(machines.gpus_per_node),
        _divisors(gpus, most=pieces),
        _divisors(gpus, most=min(model.num_layers, _MOST_STAGES)),
    ):
        if gpus % (tp * cp * pp):
            continue
        ranks = gpus // (tp * pp)
        chunks = model.num_layers // pp
        for ep, vpp in product(
            [ep for ep in _divisors(experts) if ranks % ep == 0],
            [vpp for vpp in (1, 2, 4) if vpp == 1 or (pp > 1 and chunks % vpp == 0)],
        ):
            yield ParallelSpec(tp=tp, cp=cp, pp=pp, ep=ep, vpp=vpp, sequence_parallel=tp > 1)


def _divisors(size: int, *, most: int | None = None) -> list[int]:
    return [n for n in range(1, min(size, most or size) + 1) if size % n == 0]


def _possible(spec: JobSpec, layout: Layout, model: ModelConfig) -> bool:
    problems = check_batch(spec, layout) + check_cuts(spec, layout)
    problems += check_fit(spec, layout, model)
    if spec.samples:
        problems += check_rollout_world(spec.rollout.layout.tp, layout.world_size)
    return not problems


def _savings(spec: JobSpec) -> Iterator[JobSpec]:
    """The job with ever more done to save memory, what costs least first."""
    for offload, recompute in (
        (False, "none"),
        (False, "selective"),
        (False, "full"),
        (True, "none"),
        (True, "full"),
    ):
        if offload and spec.precision.dtype == "fp32":
            continue  # refused at submit
        training = spec.training.model_copy(update={"recompute": recompute})
        optimizer = spec.optimizer.model_copy(update={"offload": offload})
        yield spec.model_copy(update={"training": training, "optimizer": optimizer})


def _proposal(spec: JobSpec, model: ModelConfig, layout: Layout, machines: Machines) -> Proposal:
    stages = {0, layout.pp - 1}  # in between, a stage has less than the first and no more layers
    memory = max(
        (
            _with_cache(spec, model, stage, machines)
            for stage in estimate(spec, model, layout, stages=sorted(stages))
        ),
        key=lambda stage: stage.total,
    )
    time = step_time(spec, model, layout, gpus_per_node=machines.gpus_per_node)
    return Proposal(
        spec=spec,
        layout=layout,
        memory=memory,
        time=time,
        reason=_reason(spec, layout, time, memory.total / machines.usable_bytes),
    )


def _with_cache(
    spec: JobSpec, model: ModelConfig, stage: StageMemory, machines: Machines
) -> StageMemory:
    """The cache as large as the engine makes it, but never below one sequence."""
    if not stage.kv_cache:
        return stage
    share = int(max(machines.usable_bytes - stage.resident, 0) * CACHE_SHARE)
    one = spec.training.max_length * cache_bytes_per_token(spec, model)
    cache = max(share, one)
    return replace(stage, kv_cache=cache, total=stage.total - stage.kv_cache + cache)


def _reason(spec: JobSpec, layout: Layout, time: StepTime, full: float) -> str:
    """In words: what the layout costs, and how full the GPU is."""
    costs = [
        (time.recompute, f"{spec.training.recompute} recomputation"),
        (time.bubble, f"pipeline bubble of {layout.pp} stages"),
        (time.tensor, "tensor-parallel communication"),
        (time.context, "context-parallel communication"),
        (time.expert, "tokens sent to experts"),
        (time.data, "gradient sums"),
        (time.offload, "optimizer offload"),
    ]
    said = [f"{cost:.0%} {name}" for cost, name in sorted(costs, reverse=True) if cost >= 0.005]
    on_top = ", ".join(said) or "nothing"
    return f"{full:.0%} of the usable memory; on top of the products: {on_top}"
