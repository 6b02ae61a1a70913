"""Whether batches, lengths and schedules come out even."""

from service.spec import JobSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padding_factor
from service.validation.layout import samples
from service.validation.problems import FieldProblem


def check_batch(spec: JobSpec, layout: Layout) -> list[FieldProblem]:
    """Whether the global batch divides into ranks, micro-batches, groups and pipeline rounds.

    Args:
        layout: of training.
    """
    problems = []
    size, micro, dp = spec.training.global_batch_size, spec.training.micro_batch_size, layout.dp
    field = "training.global_batch_size"
    if size % dp:
        problems.append(
            FieldProblem(
                field=field,
                message=f"{size} sequences do not divide over dp = {dp} ranks",
                fix=f"use a multiple of {dp}, as {_next_multiple(size, dp)}",
            )
        )
    elif micro != "auto" and (size // dp) % micro:
        step = dp * micro
        problems.append(
            FieldProblem(
                field=field,
                message=f"{size} sequences are no multiple of dp x micro_batch_size = "
                f"{dp} x {micro} = {step}",
                fix=f"use a multiple of {step}, as {_next_multiple(size, step)}, "
                "or micro_batch_size: auto",
            )
        )
    elif micro != "auto" and layout.vpp > 1 and size // (dp * micro) % layout.pp:
        step = dp * micro * layout.pp
        problems.append(
            FieldProblem(
                field=field,
                message=f"{size // (dp * micro)} micro-batches on each rank are no multiple of "
                f"pp = {layout.pp}, as virtual stages need",
                fix=f"use a multiple of {step}, as {_next_multiple(size, step)}, "
                "or micro_batch_size: auto",
            )
        )
    group = spec.algorithm.samples_per_prompt
    if spec.algorithm.online and size % group:
        problems.append(
            FieldProblem(
                field=field,
                message=f"{size} sequences are no multiple of the group size {group}",
                fix="it is questions x group size: use a multiple of the group size, as "
                f"{_next_multiple(size, group)}",
            )
        )
    return problems


def check_lengths(spec: JobSpec, model: ModelConfig) -> list[FieldProblem]:
    """Whether sequences fit the model, and answers fit sequences."""
    problems = []
    longest = spec.training.max_length
    if longest > model.max_positions:
        problems.append(
            FieldProblem(
                field="training.max_length",
                message=f"{longest} tokens are more than the model's max_position_embeddings, "
                f"{model.max_positions}",
                fix=f"use at most {model.max_positions}",
            )
        )
    if samples(spec) and spec.rollout.max_new_tokens >= longest:
        problems.append(
            FieldProblem(
                field="rollout.max_new_tokens",
                message=f"{spec.rollout.max_new_tokens} new tokens leave no room for the question "
                f"in training.max_length = {longest}",
                fix=f"use less than {longest}, or a larger max_length",
            )
        )
    return problems


def check_cuts(spec: JobSpec, layout: Layout) -> list[FieldProblem]:
    """Whether sequences are long enough to be cut over ranks.

    Lengths need not divide: they are padded. A bound below one piece for each rank is a mistake.
    """
    least = padding_factor(layout, fp8=spec.precision.fp8)
    longest = spec.training.max_length
    if (layout.cp == 1 and not layout.sequence_parallel) or longest >= least:
        return []
    cuts = f"cp = {layout.cp}"
    if layout.sequence_parallel:
        cuts += f" and sequence parallelism over tp = {layout.tp}"
    problem = FieldProblem(
        field="training.max_length",
        message=f"{longest} tokens are fewer than the {least} into whose multiples {cuts} cut",
        fix=f"use at least {least}, or a lower cp or tp",
    )
    return [problem]


def check_schedule(spec: JobSpec) -> list[FieldProblem]:
    """Whether the warm-up ends before the job does."""
    steps, warmup = spec.training.steps, spec.optimizer.warmup_steps
    if steps is None or warmup <= steps:
        return []
    problem = FieldProblem(
        field="optimizer.warmup_steps",
        message=f"{warmup} steps of warm-up are more than training.steps = {steps}",
        fix=f"use at most {steps}",
    )
    return [problem]


def _next_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
