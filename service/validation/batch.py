"""Whether batches, lengths and schedules come out even."""

from service.spec import JobSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padding_factor
from service.validation.layout import divisors
from service.validation.problems import FieldProblem

_BATCH = "training.global_batch_size"


def check_batch(spec: JobSpec, layout: Layout) -> list[FieldProblem]:
    """Whether the global batch divides into optimizer steps, ranks, micro-batches, groups and
    pipeline rounds.

    Args:
        layout: of training.
    """
    size, deals = spec.training.global_batch_size, spec.algorithm.steps_per_batch
    problems = _least_batch(spec)
    if size % deals:
        problems.append(
            FieldProblem(
                field="algorithm.mini_batches",
                message=f"{size} rows are no multiple of the {deals} optimizer steps that they are "
                "dealt into",
                fix=divisors("it", size),
            )
        )
    else:
        problems += _check_step(spec, layout, size // deals)
    group = spec.algorithm.samples_per_prompt
    if spec.algorithm.online and size % group:
        problems.append(
            FieldProblem(
                field=_BATCH,
                message=f"{size} sequences are no multiple of the group size {group}",
                fix="it is questions x group size: use a multiple of the group size, as "
                f"{_next_multiple(size, group)}",
            )
        )
    return problems


def _least_batch(spec: JobSpec) -> list[FieldProblem]:
    size, least = spec.training.global_batch_size, spec.algorithm.least_batch
    if size >= least:
        return []
    problem = FieldProblem(
        field=_BATCH,
        message=f"{spec.algorithm.type} compares the rows of a batch, and needs at least {least}",
        fix=f"use at least {least}",
    )
    return [problem]


def _check_step(spec: JobSpec, layout: Layout, rows: int) -> list[FieldProblem]:
    """Whether the rows of one optimizer step divide over ranks and micro-batches."""
    micro, dp, deals = spec.training.micro_batch_size, layout.dp, spec.algorithm.steps_per_batch
    size, each = spec.training.global_batch_size, spec.algorithm.sequences_per_row
    of_one = f"{rows} {'sequences' if each == 1 else 'pairs'}"
    if deals > 1:
        of_one += f" of each of {deals} mini-batches"
    if rows % dp:
        problem = FieldProblem(
            field=_BATCH,
            message=f"{of_one} do not divide over dp = {dp} ranks",
            fix=f"use a multiple of {dp * deals}, as {_next_multiple(size, dp * deals)}",
        )
        return [problem]
    if micro == "auto":
        return []
    if micro % each:
        problem = FieldProblem(
            field="training.micro_batch_size",
            message=f"{micro} sequences are no whole number of pairs, which stay together",
            fix=f"use a multiple of {each}, as {_next_multiple(micro, each)}, or auto",
        )
        return [problem]
    step = dp * micro // each
    if rows % step:
        sizes = f"{dp} x {micro}" if each == 1 else f"{dp} x {micro} / {each}"
        problem = FieldProblem(
            field=_BATCH,
            message=f"{of_one} are no multiple of dp x micro_batch_size = {sizes} = {step}",
            fix=f"use a multiple of {step * deals}, as {_next_multiple(size, step * deals)}, "
            "or micro_batch_size: auto",
        )
        return [problem]
    if layout.vpp > 1 and rows // step % layout.pp:
        whole = step * layout.pp * deals
        problem = FieldProblem(
            field=_BATCH,
            message=f"{rows // step} micro-batches on each rank are no multiple of "
            f"pp = {layout.pp}, as virtual stages need",
            fix=f"use a multiple of {whole}, as {_next_multiple(size, whole)}, "
            "or micro_batch_size: auto",
        )
        return [problem]
    return []


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
    if spec.samples and spec.rollout.max_new_tokens >= longest:
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
    """Whether the warm-up ends before the job does, and the policy learns at all."""
    steps, warmup, critic = spec.training.steps, spec.optimizer.warmup_steps, spec.algorithm.critic
    problems: list[FieldProblem] = []
    if steps is not None and warmup > steps:
        problems.append(
            FieldProblem(
                field="optimizer.warmup_steps",
                message=f"{warmup} steps of warm-up are more than training.steps = {steps}",
                fix=f"use at most {steps}",
            )
        )
    if steps is not None and critic is not None and critic.warmup_steps >= steps:
        problems.append(
            FieldProblem(
                field="algorithm.value_model.warmup_steps",
                message=f"only the critic learns in the first {critic.warmup_steps} steps, and "
                f"training.steps is {steps}",
                fix=f"use less than {steps}",
            )
        )
    return problems


def _next_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
