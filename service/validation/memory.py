"""How much memory a job takes on one rank of each pipeline stage, by formula.

What stays is what Megatron-Core's distributed optimizer keeps: weights in `precision.dtype`;
gradients in fp32; two fp32 moments and, for bf16 and fp16, an fp32 copy of the weights, all three
divided over the ranks that hold the same weights. A critic has all of that once more, with a vector
in the place of its output layer. The sampling copy holds weights only, as does the reference model.
What comes and goes are the activations of a step
(`service.validation.activations`) and what the sampler needs while it samples: keys and values, and
on the CPU in fp32 a second copy of its matrices. Policy and critic take their steps one after the
other, so the larger of the two counts.

A teacher or a reward model has ranks of its own, which hold weights and read.

Left out are what a driver and its libraries take (on CUDA one to two GiB of context, collectives
and workspaces), short-lived buffers, and what the allocator cannot use.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from service.spec import FrozenLayout, JobSpec
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padded_vocab_size
from service.validation.activations import estimate_activations, estimate_reading
from service.validation.parameters import RankParameters, rank_parameters

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_GRADIENT_BYTES = 4
_MOMENT_BYTES = 4 + 4
_MASTER_BYTES = {"fp32": 0, "bf16": 4, "fp16": 4}
# Transformer Engine holds a matrix twice, for products with it and with its transpose.
_FP8_BYTES = 2
# What the CPU's engine gives one batch (`megatron_backend.generation.cpu_engine`).
CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of each rank in one pipeline stage."""

    pp_rank: int
    parameters: int
    """How many parameters the rank holds."""
    weights: int
    gradients: int
    optimizer: int
    rollout_weights: int
    reference_weights: int
    critic: int
    """Weights, gradients and optimizer state of the critic."""
    activations: int
    """Of a step's forward passes, at their worst moment."""
    logits: int
    """Chunks of logits and the output layer's gradient."""
    packed_weights: int
    """The sampling copy's matrices once more, while it samples on a CPU in fp32."""
    kv_cache: int
    """Keys and values of all sequences that the rank samples, at full length."""
    total: int
    """At the worst moment. On the CPU what sampling takes is gone before a step begins."""

    @property
    def resident(self) -> int:
        """What is there all the time."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.rollout_weights
            + self.reference_weights
            + self.critic
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMemory:
    """Bytes of each rank in one pipeline stage of a model that only reads."""

    pp_rank: int
    parameters: int
    """How many parameters the rank holds."""
    weights: int
    activations: int
    """Of one forward pass, in which nothing is kept for a backward one."""
    logits: int
    """Chunks of logits; none for a reward model."""

    @property
    def total(self) -> int:
        """At the worst moment."""
        return self.weights + self.activations + self.logits


def estimate(
    spec: JobSpec, model: ModelConfig, layout: Layout, *, stages: Iterable[int] | None = None
) -> list[StageMemory]:
    """The memory of a rank in each pipeline stage, first to last.

    Args:
        layout: of training; it fits the model.
        stages: which; null takes all.
    """
    wanted = range(layout.pp) if stages is None else stages
    return [_stage(spec, model, layout, stage) for stage in wanted]


def estimate_frozen(
    spec: JobSpec, model: ModelConfig, frozen: FrozenLayout, *, head: Head
) -> list[FrozenMemory]:
    """The memory of a rank in each pipeline stage of a teacher or a reward model."""
    layout = Layout.of_frozen(frozen, model)
    cuda = spec.resources.gpus_per_node > 0
    stages = []
    for stage in range(layout.pp):
        held = rank_parameters(model, layout, stage=stage, head=head)
        activations, logits = estimate_reading(
            spec, model, layout, stage=stage, cuda=cuda, head=head
        )
        stages.append(
            FrozenMemory(
                pp_rank=stage,
                parameters=held.total,
                weights=held.total * _BYTES[spec.precision.dtype],
                activations=activations,
                logits=logits,
            )
        )
    return stages


def _stage(spec: JobSpec, model: ModelConfig, layout: Layout, stage: int) -> StageMemory:
    cuda, head = spec.resources.gpus_per_node > 0, spec.algorithm.head
    held = rank_parameters(model, layout, stage=stage, head=head)
    reference = held.total * _BYTES[spec.precision.dtype] if spec.algorithm.keeps_reference else 0
    step = estimate_activations(spec, model, layout, stage=stage, cuda=cuda, head=head)
    rollout, packed, cache = _sampler(spec, model, layout, cuda=cuda)
    passing = step.most_with_logits
    without_total = StageMemory(
        pp_rank=stage,
        parameters=held.total,
        weights=weight_bytes(spec, held, cuda=cuda),
        gradients=held.total * _GRADIENT_BYTES,
        optimizer=optimizer_bytes(spec, held, layout, cuda=cuda),
        rollout_weights=rollout,
        reference_weights=reference,
        critic=_critic_bytes(spec, model, layout, stage=stage, cuda=cuda),
        activations=step.most,
        logits=step.logits,
        packed_weights=packed,
        kv_cache=cache,
        total=0,
    )
    total = without_total.resident + (passing + cache if cuda else max(passing, packed + cache))
    return replace(without_total, total=total)


def _critic_bytes(
    spec: JobSpec, model: ModelConfig, layout: Layout, *, stage: int, cuda: bool
) -> int:
    if spec.algorithm.critic is None:
        return 0
    held = rank_parameters(model, layout, stage=stage, head="value")
    trained = weight_bytes(spec, held, cuda=cuda) + held.total * _GRADIENT_BYTES
    return trained + optimizer_bytes(spec, held, layout, cuda=cuda)


def weight_bytes(spec: JobSpec, held: RankParameters, *, cuda: bool) -> int:
    """The trained weights. On CUDA, FP8 adds copies of matrices, or takes the place of them."""
    element = _BYTES[spec.precision.dtype]
    fp8 = spec.precision.fp8
    if fp8 is None or not cuda:
        return held.total * element
    kept = held.total - held.linear if fp8.params_in_fp8 else held.total
    return kept * element + held.linear * _FP8_BYTES


def optimizer_bytes(spec: JobSpec, held: RankParameters, layout: Layout, *, cuda: bool) -> int:
    """Moments and fp32 weights, on the GPU unless they are offloaded from it."""
    if cuda and spec.optimizer.offload:
        return 0
    state = _MOMENT_BYTES + _MASTER_BYTES[spec.precision.dtype]
    copies = layout.dp * layout.cp
    return -(-held.dense * state // copies) + -(-held.experts * state * layout.ep // copies)


def cache_bytes_per_token(spec: JobSpec, model: ModelConfig) -> int:
    """Keys and values of one token in all layers, on one rank of the sampler."""
    heads = max(model.num_kv_heads // spec.rollout.layout.tp, 1)
    element = _BYTES[spec.precision.dtype]
    return 2 * model.num_layers * heads * model.head_dim * element


def _sampler(
    spec: JobSpec, model: ModelConfig, layout: Layout, *, cuda: bool
) -> tuple[int, int, int]:
    """(weights of the sampling copy, its matrices for a CPU, its keys and values)."""
    if not spec.samples:
        return 0, 0, 0
    tp = spec.rollout.layout.tp
    held = rank_parameters(model, Layout(tp=tp), stage=0)
    weights, packed = held.total * _BYTES[spec.precision.dtype], 0
    if spec.precision.dtype == "fp32" and not cuda:  # as `megatron_backend.generation.matrices`
        output = padded_vocab_size(model.vocab_size, tp=tp) // tp * model.hidden_size
        packed = (held.linear + output) * _BYTES["fp32"]
    trained = spec.training.global_batch_size if spec.algorithm.online else 0
    evaluated = spec.evaluation.items * spec.evaluation.samples_per_item
    rows = -(-max(trained, evaluated) * tp // layout.world_size)
    per_token = cache_bytes_per_token(spec, model)
    cache = rows * spec.training.max_length * per_token
    if not cuda:
        one = spec.training.max_length * per_token
        cache = min(cache, max(CPU_CACHE_BYTES, one))
    return weights, packed, cache
