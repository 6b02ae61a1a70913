"""How much memory a layout takes on each rank, for weights, gradients and optimizer state.

Activations, the KV cache and workspaces are left out: they depend on kernels and lengths. What is
counted is what Megatron-Core's distributed optimizer keeps: weights in `precision.dtype`; gradients
in fp32; two fp32 moments and, for bf16, an fp32 master copy, all three divided over the ranks of
data parallelism. The sampling copy holds weights only, as does the reference model of a KL term.
"""

from dataclasses import dataclass

from service.spec import JobSpec
from service.validation.layout import samples
from service.validation.model_shape import ModelShape

_BYTES = {"fp32": 4, "bf16": 2}
_GRADIENT_BYTES = 4
_MOMENT_BYTES = 4 + 4
_MASTER_BYTES = {"fp32": 0, "bf16": 4}


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

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.rollout_weights
            + self.reference_weights
        )


def padded_vocabulary(size: int, tp: int) -> int:
    """Rows of embedding and output layer, as the workers pad them for `tp` ranks."""
    multiple = (128 if size >= 1024 else 8) * tp
    return -(-size // multiple) * multiple


def estimate(spec: JobSpec, shape: ModelShape, dp: int) -> list[StageMemory]:
    """The memory of a rank in each pipeline stage, first to last."""
    tp, pp = spec.parallel.tp, spec.parallel.pp
    element = _BYTES[spec.precision.dtype]
    rollout = 0
    if samples(spec):
        rollout = _stage_parameters(shape, tp=spec.rollout.layout.tp, pp=1, stage=0)
    keeps_reference = getattr(spec.algorithm, "kl_coef", 0.0) > 0
    stages = []
    for stage in range(pp):
        parameters = _stage_parameters(shape, tp=tp, pp=pp, stage=stage)
        state = _MOMENT_BYTES + _MASTER_BYTES[spec.precision.dtype]
        stages.append(
            StageMemory(
                pp_rank=stage,
                parameters=parameters,
                weights=parameters * element,
                gradients=parameters * _GRADIENT_BYTES,
                optimizer=-(-parameters * state // dp),
                rollout_weights=rollout * element,
                reference_weights=parameters * element if keeps_reference else 0,
            )
        )
    return stages


def _stage_parameters(shape: ModelShape, *, tp: int, pp: int, stage: int) -> int:
    """Parameters of one rank: matrices are split over tp, norms are on every rank."""
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.family == "qwen3" else 0)
    layer = (shape.layer_parameters - norms) // tp + norms
    total = shape.layers // pp * layer
    embedding = padded_vocabulary(shape.vocabulary, tp) // tp * shape.hidden
    if stage == 0:
        total += embedding
    if stage == pp - 1:
        total += shape.hidden
        # A tied output layer is the embedding itself, unless that lives on another rank.
        if not shape.tied or pp > 1:
            total += embedding
    return total
