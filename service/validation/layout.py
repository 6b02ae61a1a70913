"""Whether a layout fits the machines and the model; every rule is one row that can be read."""

from service.spec import JobSpec
from service.validation.model_shape import ModelShape
from service.validation.problems import FieldProblem


def resolve_dp(spec: JobSpec) -> tuple[int | None, list[FieldProblem]]:
    """Data parallelism with `auto` resolved, or None and what does not fit the machines.

    On GPUs there is one rank per GPU, so tp x pp x dp must be nodes x gpus_per_node. On the CPU
    `auto` means 1, and any number of ranks shares one machine.
    """
    parallel, resources = spec.parallel, spec.resources
    model_ranks = parallel.tp * parallel.pp
    if resources.gpus_per_node == 0:
        if resources.nodes > 1:
            problem = FieldProblem(
                field="resources.nodes",
                message="ranks on the CPU share one machine",
                fix="set nodes to 1, or gpus_per_node above 0",
            )
            return None, [problem]
        return (1 if parallel.dp == "auto" else parallel.dp), []
    gpus = resources.nodes * resources.gpus_per_node
    if gpus % model_ranks:
        problem = FieldProblem(
            field="parallel",
            message=f"tp x pp = {parallel.tp} x {parallel.pp} does not divide the world of "
            f"{resources.nodes} x {resources.gpus_per_node} = {gpus} GPUs",
            fix="lower tp or pp, or ask for other resources",
        )
        return None, [problem]
    dp = gpus // model_ranks
    if parallel.dp not in ("auto", dp):
        problem = FieldProblem(
            field="parallel.dp",
            message=f"tp x pp x dp = {model_ranks * int(parallel.dp)} ranks for {gpus} GPUs",
            fix=f"set dp to {dp} or auto",
        )
        return None, [problem]
    return dp, []


def check_layout(spec: JobSpec, shape: ModelShape) -> list[FieldProblem]:
    """Whether tp and pp divide the model, for training and for sampling."""
    problems = _tensor_parallel("parallel.tp", spec.parallel.tp, shape)
    pp = spec.parallel.pp
    if shape.layers % pp:
        problems.append(
            FieldProblem(
                field="parallel.pp",
                message=f"pp = {pp} does not divide the model's {shape.layers} layers",
                fix=_divisors("pp", shape.layers),
            )
        )
    if samples(spec):
        problems += _tensor_parallel("rollout.layout.tp", spec.rollout.layout.tp, shape)
    return problems


def check_rollout_world(spec: JobSpec, world_size: int) -> list[FieldProblem]:
    """Whether copies of the generator fill the ranks."""
    tp = spec.rollout.layout.tp
    if not samples(spec) or world_size % tp == 0:
        return []
    problem = FieldProblem(
        field="rollout.layout.tp",
        message=f"tp = {tp} does not divide the {world_size} ranks of the job",
        fix=_divisors("it", world_size),
    )
    return [problem]


def samples(spec: JobSpec) -> bool:
    """True where the job generates: to learn from it, or to be evaluated."""
    return spec.algorithm.online or spec.evaluation.items > 0


def _tensor_parallel(field: str, tp: int, shape: ModelShape) -> list[FieldProblem]:
    problems = []
    for size, name in (
        (shape.heads, "num_attention_heads"),
        (shape.kv_heads, "num_key_value_heads"),
    ):
        if size % tp:
            problems.append(
                FieldProblem(
                    field=field,
                    message=f"tp must divide {name}: tp = {tp}, {name} = {size}",
                    fix=_divisors("tp", size),
                )
            )
    if shape.intermediate % tp:
        problems.append(
            FieldProblem(
                field=field,
                message=f"tp must divide intermediate_size: tp = {tp}, "
                f"intermediate_size = {shape.intermediate}",
                fix="use a tp that divides it",
            )
        )
    return problems


def _divisors(name: str, size: int) -> str:
    fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    return f"{name} can be {', '.join(fitting)}"
