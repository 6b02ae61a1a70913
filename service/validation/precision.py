"""Whether number formats, model, layout and hardware go together.

Without GPUs any recipe of FP8 is emulated, and nothing of the hardware matters. With GPUs a recipe
needs kernels of a generation of cards, and matrices whose sides, after tensor parallelism, are
multiples of what those kernels take.
"""

from service.spec import JobSpec
from service.spec.model_config import ModelConfig
from service.spec.padding import fp8_alignment
from service.validation.layout import Sizes, samples
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
    problems = []
    precision, gpus = spec.precision, spec.resources.gpus_per_node > 0
    if gpus and samples(spec) and precision.dtype != "bf16":
        problems.append(
            FieldProblem(
                field="precision.dtype",
                message=f"{precision.dtype} on GPUs cannot go with sampling, which this job does: "
                "the generation engine's attention kernels know bf16 only",
                fix="use bf16, or gpus_per_node: 0, or train offline with evaluation.items: 0",
            )
        )
    if gpus and spec.optimizer.offload and precision.dtype == "fp32":
        problems.append(
            FieldProblem(
                field="optimizer.offload",
                message="with dtype fp32 the optimizer updates the weights themselves, and "
                "Megatron offloads copies only",
                fix="set it to false, or use bf16 or fp16",
            )
        )
    fp8 = precision.fp8
    if fp8 is None:
        return problems
    if precision.dtype == "fp32":
        problems.append(
            FieldProblem(
                field="precision.dtype",
                message="FP8 products give 16-bit results, and dtype is fp32",
                fix="use bf16 or fp16, or fp8: null",
            )
        )
    if fp8.recipe == "delayed" and fp8.first_last_bf16_layers:
        problems.append(
            FieldProblem(
                field="precision.fp8.first_last_bf16_layers",
                message="the recipe delayed keeps one history for all layers, so none can stay "
                f"in {precision.dtype}",
                fix="set it to 0, or use the recipe tensorwise, blockwise or mxfp8",
            )
        )
    if not spec.training.packing:
        problems.append(
            FieldProblem(
                field="training.packing",
                message="FP8 takes its scales from whole tensors, and with packing: false there is "
                "padding in them",
                fix="use packing: true, or fp8: null",
            )
        )
    least, cards = LEAST_CAPABILITY[fp8.recipe]
    if gpus and capability is not None and not has_kernels(fp8.recipe, capability):
        able = [name for name in LEAST_CAPABILITY if has_kernels(name, capability)]
        problems.append(
            FieldProblem(
                field="precision.fp8.recipe",
                message=f"{fp8.recipe} needs compute capability {dotted(least)} ({cards}"
                f"{'' if fp8.recipe == 'mxfp8' else ' or newer'}), and the GPUs of "
                f"{spec.resources.cluster} have {dotted(capability)}",
                fix=f"use one of: {', '.join(able)}" if able else "use fp8: null",
            )
        )
    return problems


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
