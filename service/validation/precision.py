"""Whether number formats, model, layout and hardware go together.

Without GPUs any recipe of FP8 is emulated, and nothing of the hardware matters. With GPUs a recipe
needs kernels of a generation of cards, and matrices whose sides, after tensor parallelism, are
multiples of what those kernels take.
"""

from service.spec import Fp8Spec, JobSpec
from service.spec.model_config import ModelConfig
from service.spec.padding import fp8_alignment
from service.validation.layout import Sizes
from service.validation.problems import FieldProblem

Capability = tuple[int, int]

# The oldest cards with kernels for a recipe, as Transformer Engine asks for them.
LEAST_CAPABILITY: dict[str, tuple[Capability, str]] = {
    "delayed": ((8, 9), "Ada or Hopper"),
    "tensorwise": ((8, 9), "Ada or Hopper"),
    "blockwise": ((9, 0), "Hopper"),
    "mxfp8": ((10, 0), "Blackwell"),
}


def has_kernels(recipe: str, capability: Capability) -> bool:
    """Whether Transformer Engine has a recipe's kernels for a generation of cards."""
    # MXFP8's are for data-centre Blackwells, and not yet for the cards of 12.0.
    return LEAST_CAPABILITY[recipe][0] <= capability and (recipe != "mxfp8" or capability < (12, 0))


def check_formats(spec: JobSpec, capability: Capability | None) -> list[FieldProblem]:
    """What needs no model.

    Args:
        capability: CUDA compute capability of the cluster's cards; None where it is not known.
    """
    problems = _sampling(spec) + _offload(spec)
    fp8 = spec.precision.fp8
    if fp8 is None:
        return problems
    problems += _fp8_results(spec)
    problems += _bf16_layers(spec, fp8)
    problems += _fp8_packing(spec)
    return problems + _fp8_kernels(spec, fp8, capability)


def _sampling(spec: JobSpec) -> list[FieldProblem]:
    """Whether the generation engine can compute in the job's format."""
    dtype = spec.precision.dtype
    if spec.resources.gpus_per_node == 0 or not spec.samples or dtype == "bf16":
        return []
    return [
        FieldProblem(
            field="precision.dtype",
            message=f"{dtype} on GPUs cannot go with sampling, which this job does: "
            "the generation engine's attention kernels know bf16 only",
            fix="use bf16, or gpus_per_node: 0, or train offline with evaluation.items: 0",
        )
    ]


def _offload(spec: JobSpec) -> list[FieldProblem]:
    """Whether the optimizer has copies of the weights that can be offloaded."""
    offloads = spec.resources.gpus_per_node > 0 and spec.optimizer.offload
    if not offloads or spec.precision.dtype != "fp32":
        return []
    return [
        FieldProblem(
            field="optimizer.offload",
            message="with dtype fp32 the optimizer updates the weights themselves, and "
            "Megatron offloads copies only",
            fix="set it to false, or use bf16 or fp16",
        )
    ]


def _fp8_results(spec: JobSpec) -> list[FieldProblem]:
    """Whether the job's format is one that FP8 products have."""
    if spec.precision.dtype != "fp32":
        return []
    return [
        FieldProblem(
            field="precision.dtype",
            message="FP8 products give 16-bit results, and dtype is fp32",
            fix="use bf16 or fp16, or fp8: null",
        )
    ]


def _bf16_layers(spec: JobSpec, fp8: Fp8Spec) -> list[FieldProblem]:
    """Whether the recipe lets some layers stay out of FP8."""
    if fp8.recipe != "delayed" or fp8.first_last_bf16_layers == 0:
        return []
    return [
        FieldProblem(
            field="precision.fp8.first_last_bf16_layers",
            message="the recipe delayed keeps one history for all layers, so none can stay "
            f"in {spec.precision.dtype}",
            fix="set it to 0, or use the recipe tensorwise, blockwise or mxfp8",
        )
    ]


def _fp8_packing(spec: JobSpec) -> list[FieldProblem]:
    """Whether tensors are free of padding, which would count in their scales."""
    if spec.training.packing:
        return []
    return [
        FieldProblem(
            field="training.packing",
            message="FP8 takes its scales from whole tensors, and with packing: false there is "
            "padding in them",
            fix="use packing: true, or fp8: null",
        )
    ]


def _fp8_kernels(spec: JobSpec, fp8: Fp8Spec, capability: Capability | None) -> list[FieldProblem]:
    """Whether the cluster's cards have the recipe's kernels."""
    if spec.resources.gpus_per_node == 0 or capability is None:
        return []
    if has_kernels(fp8.recipe, capability):
        return []
    least, cards = LEAST_CAPABILITY[fp8.recipe]
    able = [name for name in LEAST_CAPABILITY if has_kernels(name, capability)]
    return [
        FieldProblem(
            field="precision.fp8.recipe",
            message=f"{fp8.recipe} needs compute capability {dotted(least)} ({cards}"
            f"{'' if fp8.recipe == 'mxfp8' else ' or newer'}), and the GPUs of "
            f"{spec.resources.cluster} have {dotted(capability)}",
            fix=f"use one of: {', '.join(able)}" if able else "use fp8: null",
        )
    ]


def check_fp8_layers(spec: JobSpec, model: ModelConfig, layout: Sizes) -> list[FieldProblem]:
    """Whether the model's layers can be computed in FP8 in this layout."""
    fp8 = spec.precision.fp8
    if fp8 is None:
        return []
    problems = []
    most = model.num_layers // layout.pp
    if fp8.first_last_bf16_layers > most:
        problems.append(
            FieldProblem(
                field="precision.fp8.first_last_bf16_layers",
                message=f"{fp8.first_last_bf16_layers} layers at each end are more than the {most} "
                "of a pipeline stage",
                fix=f"use at most {most}",
            )
        )
    if spec.resources.gpus_per_node == 0:
        return problems
    multiple = fp8_alignment(fp8)
    odd = [f"{name} = {size}" for name, size in _sides(model, layout.tp) if size % multiple]
    if odd:
        problems.append(
            FieldProblem(
                field="precision.fp8.recipe",
                message=f"{fp8.recipe} takes matrices whose sides are multiples of {multiple} on "
                f"each rank, and with tp = {layout.tp} there are {', '.join(odd)}",
                fix="use a lower tp, another recipe (tensorwise takes multiples of 16), or "
                "fp8: null",
            )
        )
    return problems


def _sides(model: ModelConfig, tp: int) -> list[tuple[str, int]]:
    """Rows and columns of a rank's matrices in one layer."""
    query = model.num_heads * model.head_dim
    key_value = 2 * model.num_kv_heads * model.head_dim
    name, width = model.mlp_width
    return [
        ("hidden_size", model.hidden_size),
        ("query heads x head_dim / tp", query // tp),
        ("(query + key + value heads) x head_dim / tp", (query + key_value) // tp),
        (f"{name} / tp", width // tp),
    ]


def dotted(capability: Capability) -> str:
    """As NVIDIA writes it: `9.0`."""
    return f"{capability[0]}.{capability[1]}"
