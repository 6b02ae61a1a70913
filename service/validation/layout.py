"""Whether a layout fits the machines and the model; every rule is one function that can be read.

`Layout` and `ModelConfig` refuse the same layouts with their own errors, where the workers build
them; a property test holds the two to each other. Here every problem comes at once, with a fix.
"""

import math
from collections.abc import Iterable

from service.spec import JobSpec, ParallelSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padded_vocab_size
from service.validation.problems import FieldProblem

type Sizes = ParallelSpec | Layout
"""What a job asks for, or what it gets: the rules read the same names of both."""


def resolve_layout(spec: JobSpec) -> tuple[Layout | None, list[FieldProblem]]:
    """The layout with `dp: auto` resolved, or None and what is wrong with it.

    On GPUs there is one rank per GPU, so tp x cp x pp x dp must be nodes x gpus_per_node, less the
    ranks of a teacher and a reward model. On the CPU any number of ranks shares a machine, and
    `auto` is the least that uses all machines.
    """
    problems = _dimensions(spec.parallel)
    dp, found = _resolve_dp(spec)
    problems += found
    if dp is not None:
        problems += _expert_ranks(spec.parallel, dp)
    if dp is None or problems:
        return None, problems
    return Layout.from_spec(spec.parallel, dp=dp), []


def _dimensions(parallel: ParallelSpec) -> list[FieldProblem]:
    """What `parallel` can tell by itself."""
    problems = []
    if parallel.vpp > 1 and parallel.pp == 1:
        problems.append(
            FieldProblem(
                field="parallel.vpp",
                message=f"vpp = {parallel.vpp} cuts pipeline stages, and pp is 1",
                fix="set vpp to 1, or pp above 1",
            )
        )
    if parallel.sequence_parallel and parallel.tp == 1:
        problems.append(
            FieldProblem(
                field="parallel.sequence_parallel",
                message="it splits sequences between tensor-parallel ranks, and tp is 1",
                fix="set it to false, or tp above 1",
            )
        )
    stages = parallel.pipeline_layers
    if stages is not None and len(stages) != parallel.pp:
        problems.append(
            FieldProblem(
                field="parallel.pipeline_layers",
                message=f"it has {len(stages)} entries for pp = {parallel.pp} stages",
                fix=f"give {parallel.pp} numbers, or null, which spreads the layers evenly",
            )
        )
    if stages is not None and parallel.vpp > 1:
        problems.append(
            FieldProblem(
                field="parallel.pipeline_layers",
                message=f"it cannot go with vpp = {parallel.vpp}: chunks are all of one size",
                fix="set it to null, or vpp to 1",
            )
        )
    return problems


def _resolve_dp(spec: JobSpec) -> tuple[int | None, list[FieldProblem]]:
    parallel, resources = spec.parallel, spec.resources
    if resources.gpus_per_node == 0:
        return _resolve_cpu_dp(spec)
    frozen = frozen_ranks(spec)
    gpus = resources.nodes * resources.gpus_per_node - frozen
    world = f"{resources.nodes} x {resources.gpus_per_node}"
    beside = f" less the {frozen} of {_frozen_names(spec)}" if frozen else ""
    if gpus < 1:
        problem = FieldProblem(
            field="resources.gpus_per_node",
            message=f"of {world} GPUs none is left to train on: {_frozen_names(spec)} takes "
            f"{frozen}",
            fix="ask for more GPUs, or lower tp, pp or dp in the `layout` of that model",
        )
        return None, [problem]
    copy = parallel.tp * parallel.cp * parallel.pp
    sizes = f"{parallel.tp} x {parallel.cp} x {parallel.pp}"
    if gpus % copy:
        problem = FieldProblem(
            field="parallel",
            message=f"tp x cp x pp = {sizes} does not divide the world of {world}{beside} = "
            f"{gpus} GPUs",
            fix="lower tp, cp or pp, or ask for other resources",
        )
        return None, [problem]
    dp = gpus // copy
    if parallel.dp not in ("auto", dp):
        problem = FieldProblem(
            field="parallel.dp",
            message=f"tp x cp x pp x dp = {sizes} x {parallel.dp} = {copy * int(parallel.dp)} "
            f"ranks for {gpus} GPUs{f' ({world}{beside})' if frozen else ''}",
            fix=f"set dp to {dp} or auto",
        )
        return None, [problem]
    return dp, []


def _resolve_cpu_dp(spec: JobSpec) -> tuple[int | None, list[FieldProblem]]:
    """Tensor-parallel groups stay whole, so every machine must get as many of them."""
    parallel, nodes = spec.parallel, spec.resources.nodes
    groups = parallel.cp * parallel.pp
    dp = nodes // math.gcd(nodes, groups) if parallel.dp == "auto" else parallel.dp
    if groups * dp % nodes == 0:
        return dp, []
    problem = FieldProblem(
        field="resources.nodes",
        message=f"{nodes} machines cannot share {groups * dp} tensor-parallel groups "
        f"(cp x pp x dp) evenly",
        fix=f"set parallel.dp to auto, or nodes to a divisor of {groups * dp}",
    )
    return None, [problem]


def frozen_ranks(spec: JobSpec) -> int:
    """Ranks beside those of training: of a teacher, of a reward model. Each takes a GPU."""
    return sum(frozen.layout.ranks for _, frozen in spec.frozen_models.values())


def _frozen_names(spec: JobSpec) -> str:
    return " and ".join(f"`{field}`" for field, _ in spec.frozen_models.values())


def _expert_ranks(parallel: ParallelSpec, dp: int) -> list[FieldProblem]:
    ranks = dp * parallel.cp
    if ranks % parallel.ep == 0:
        return []
    problem = FieldProblem(
        field="parallel.ep",
        message=f"ep = {parallel.ep} does not divide dp x cp = {dp} x {parallel.cp} ranks: "
        "experts are spread over those",
        fix=divisors("ep", ranks),
    )
    return [problem]


def check_layout(layout: Sizes, model: ModelConfig) -> list[FieldProblem]:
    """Whether a model can be trained in a layout."""
    problems = check_tensor_parallel("parallel.tp", layout.tp, model)
    problems += _stages(layout, model.num_layers)
    problems += _experts(layout, model)
    return problems


def _stages(layout: Sizes, layers: int) -> list[FieldProblem]:
    """Whether the layers fill the pipeline; without vpp they need not divide."""
    if layout.pipeline_layers is not None:
        total = sum(layout.pipeline_layers)
        if total == layers or len(layout.pipeline_layers) != layout.pp:
            return []  # too many or few entries are a problem of their own
        return [
            FieldProblem(
                field="parallel.pipeline_layers",
                message=f"its sum is {total}, but the model has {layers} layers",
                fix=f"give {layout.pp} numbers whose sum is {layers}, or null",
            )
        ]
    if problems := check_stages("parallel.pp", layout.pp, layers):
        return problems
    if layout.vpp > 1 and layers % (layout.pp * layout.vpp):
        per_stage, rest = divmod(layers, layout.pp)
        fitting = "vpp can be 1 only" if rest else divisors("vpp", per_stage)
        return [
            FieldProblem(
                field="parallel.vpp",
                message=f"pp x vpp = {layout.pp} x {layout.vpp} chunks do not divide the model's "
                f"{layers} layers",
                fix=f"with pp = {layout.pp}, {fitting}",
            )
        ]
    return []


def check_stages(field: str, stages: int, layers: int) -> list[FieldProblem]:
    """Whether each stage gets a layer."""
    if layers >= stages:
        return []
    message = f"{layers} layers cannot fill pp = {stages} stages"
    return [FieldProblem(field=field, message=message, fix=f"use at most {layers}")]


def _experts(layout: Sizes, model: ModelConfig) -> list[FieldProblem]:
    moe = model.moe
    if moe is None:
        if layout.ep == 1:
            return []
        return [
            FieldProblem(
                field="parallel.ep",
                message=f"ep = {layout.ep} spreads experts, and the model has none",
                fix="set ep to 1",
            )
        ]
    problems = []
    if moe.num_experts % layout.ep:
        problems.append(
            FieldProblem(
                field="parallel.ep",
                message=f"ep = {layout.ep} does not divide the model's {moe.num_experts} experts",
                fix=divisors("ep", moe.num_experts),
            )
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        problems.append(
            FieldProblem(
                field="parallel.sequence_parallel",
                message=f"a mixture of experts with tp = {layout.tp} routes each token once only "
                "where sequences are split",
                fix="set sequence_parallel to true, or tp to 1",
            )
        )
    return problems


def check_rollout(layout: Sizes, *, rollout_tp: int, model: ModelConfig) -> list[FieldProblem]:
    """Whether the generation copy fits the model, the ranks and the trained vocabulary."""
    field = "rollout.layout.tp"
    problems = check_tensor_parallel(field, rollout_tp, model)
    rows = padded_vocab_size(model.vocab_size, tp=layout.tp)
    if rows % rollout_tp:
        problems.append(
            FieldProblem(
                field=field,
                message=f"tp = {rollout_tp} does not divide the vocabulary, which training pads "
                f"from {model.vocab_size} to {rows} rows",
                fix=f"use parallel.tp, {layout.tp}, or another number that divides {rows}",
            )
        )
    return problems


def check_rollout_world(rollout_tp: int, world_size: int) -> list[FieldProblem]:
    """Whether copies of the generator fill the ranks."""
    if world_size % rollout_tp == 0:
        return []
    problem = FieldProblem(
        field="rollout.layout.tp",
        message=f"tp = {rollout_tp} does not divide the {world_size} ranks of the job",
        fix=divisors("it", world_size),
    )
    return [problem]


def check_tensor_parallel(field: str, tp: int, model: ModelConfig) -> list[FieldProblem]:
    """Whether tp divides a model. It must divide heads and MLP; of KV heads it may also be a
    multiple, and ranks share one."""
    problems = []
    for name, size in (("num_attention_heads", model.num_heads), model.mlp_width):
        if size % tp:
            problems.append(
                FieldProblem(
                    field=field,
                    message=f"tp must divide {name}: tp = {tp}, {name} = {size}",
                    fix=divisors("tp", size),
                )
            )
    kv_heads = model.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        fitting = [n for n in _up_to_64(model.num_heads) if kv_heads % n == 0 or n % kv_heads == 0]
        problems.append(
            FieldProblem(
                field=field,
                message=f"tp must divide num_key_value_heads or be a multiple of it: tp = {tp}, "
                f"num_key_value_heads = {kv_heads}",
                fix=_one_of("tp", fitting),
            )
        )
    return problems


def divisors(name: str, size: int) -> str:
    """A fix that lists what divides `size`, up to 64."""
    return _one_of(name, _up_to_64(size))


def _up_to_64(size: int) -> list[int]:
    return [n for n in range(1, min(size, 64) + 1) if size % n == 0]


def _one_of(name: str, values: Iterable[int]) -> str:
    return f"{name} can be {', '.join(map(str, values))}"
