"""Whether a job's model, layout and formats go together, and what to know of it where they do."""

from service.spec import JobSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.validation.layout import Sizes, check_layout, check_rollout
from service.validation.precision import LEAST_CAPABILITY, Capability, check_fp8_layers, dotted
from service.validation.problems import FieldProblem


def check_fit(spec: JobSpec, layout: Sizes, model: ModelConfig) -> list[FieldProblem]:
    """Whether model, layout and formats go together, in training and in sampling."""
    problems = check_layout(layout, model) + check_fp8_layers(spec, model, layout)
    problems += check_kernels(spec, layout, model)
    if spec.samples:
        problems += check_rollout(layout, rollout_tp=spec.rollout.layout.tp, model=model)
    return problems


def check_kernels(spec: JobSpec, layout: Sizes, model: ModelConfig) -> list[FieldProblem]:
    """Whether Transformer Engine's attention, which GPUs train with, can compute the model."""
    problems: list[FieldProblem] = []
    if spec.resources.gpus_per_node == 0:
        return problems
    if model.attention_softcap is not None:
        problems.append(
            FieldProblem(
                field="resources.gpus_per_node",
                message=f"a {model.family} model caps attention scores, and Transformer Engine's "
                "attention cannot",
                fix="use 0, which trains on the CPU, or another model",
            )
        )
    window = model.sliding_window
    if layout.cp > 1 and window is not None and window < spec.training.max_length:
        problems.append(
            FieldProblem(
                field="parallel.cp",
                message=f"layers of this model see {window} tokens back, and keys that go round "
                f"cp = {layout.cp} GPUs know no such window",
                fix=f"set cp to 1, or training.max_length to at most {window}",
            )
        )
    return problems


def notes_of(
    spec: JobSpec, layout: Layout, model: ModelConfig, capability: Capability | None
) -> list[str]:
    """What a user might not expect of a job that is accepted.

    Args:
        capability: CUDA compute capability of the cluster's cards; None where it is not known.
    """
    notes = []
    fp8, gpus = spec.precision.fp8, spec.resources.gpus_per_node > 0
    if fp8 is not None and not gpus:
        notes.append(
            f"FP8 ({fp8.recipe}) is emulated on the CPU: its numbers, neither its speed nor its "
            "memory"
        )
    if fp8 is not None and gpus and capability is None:
        needed, cards = LEAST_CAPABILITY[fp8.recipe]
        notes.append(
            f"nobody knows what the GPUs of {spec.resources.cluster} are; FP8 ({fp8.recipe}) needs "
            f"compute capability {dotted(needed)} ({cards} or newer)"
        )
    if spec.optimizer.offload and not gpus:
        notes.append("optimizer.offload changes nothing on the CPU")
    if layout.tp > model.num_kv_heads:
        notes.append(f"{layout.tp // model.num_kv_heads} tensor-parallel ranks share each KV head")
    sizes = {sum(map(len, chunks)) for chunks in layout.stage_layers(model.num_layers)}
    if len(sizes) > 1:
        notes.append(f"pipeline stages have {min(sizes)} to {max(sizes)} layers")
    return notes
