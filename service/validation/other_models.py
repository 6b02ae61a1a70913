"""Models beside the one that a job trains: whether they are there, and what they must have.

A critic is of the policy's architecture. A teacher and a reward model have ranks of their own. All
read the tokens that the policy writes, so an id must mean the same to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from service.spec import FrozenModelSpec, JobSpec, ModelSource, Role
from service.spec.algorithm import Head
from service.spec.base import SpecModel
from service.spec.model_config import ModelConfig
from service.validation.layout import check_stages, check_tensor_parallel
from service.validation.model import FoundModel, ModelFinder
from service.validation.problems import FieldProblem
from service.validation.tokenizer import token_difference

ROLE_NAMES: Mapping[Role, str] = {
    "critic": "critic",
    "teacher": "teacher",
    "reward": "reward model",
}
_NOT_ARCHITECTURE = {"hf", "initializer_range", "max_positions", "tied"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOthers:
    """The other models of a job that exist.

    Attributes:
        models: by role.
        problems: of these, and of those that do not.
    """

    models: dict[Role, FoundModel]
    problems: list[FieldProblem]


def find_other_models(spec: JobSpec, finder: ModelFinder, policy: FoundModel | None) -> FoundOthers:
    """Resolves every model beside the trained one, and checks it beside that.

    Args:
        spec: the job.
        finder: finds models.
        policy: the trained one; None where it was not found, and cannot be compared with.
    """
    models: dict[Role, FoundModel] = {}
    problems: list[FieldProblem] = []
    for role, (field, source) in spec.other_models.items():
        model, found = finder.find(source, field)
        problems += found
        if model is None:
            continue
        models[role] = model
        place = _named(source, field)
        problems += _check_head(role, model, place)
        problems += _check_length(role, model.config, spec, place)
        if policy is not None:
            problems += _check_beside(role, model, policy, place)
        if role in spec.frozen_models:
            problems += _check_frozen(*spec.frozen_models[role], model.config, spec)
    return FoundOthers(models=models, problems=problems)


def head_of(role: Role) -> Head:
    """What a role asks of a model."""
    return "vocabulary" if role == "teacher" else "value"


def check_trained_head(spec: JobSpec, model: FoundModel) -> list[FieldProblem]:
    """Whether the model that is trained from can become what the algorithm trains."""
    if spec.algorithm.head == "value" or model.head != "value":
        return []
    problem = FieldProblem(
        field=_named(spec.model, "model"),
        message=f"this is a reward model: it gives numbers, and {spec.algorithm.type} trains one "
        "that writes tokens",
        fix="name the model that it was trained from; a reward model goes into `reward.model`",
    )
    return [problem]


def with_pinned(spec: JobSpec, models: Mapping[Role, FoundModel]) -> JobSpec:
    """The job with each other model's source as it was resolved."""
    for role, (field, _) in spec.other_models.items():
        spec = _replaced(spec, field.split("."), models[role].source)
    return spec


def as_before(spec: JobSpec, sent: JobSpec, pinned: JobSpec) -> JobSpec:
    """A job that goes on with another, with that one's pinned sources where it names the same.

    Args:
        spec: the new job.
        sent: the earlier one as it was sent.
        pinned: the earlier one as it was resolved.
    """
    before, resolved = sent.other_models, pinned.other_models
    for role, (field, source) in spec.other_models.items():
        if role in resolved and before.get(role) == (field, source):
            spec = _replaced(spec, field.split("."), resolved[role][1])
    return spec


def _replaced[Part: SpecModel](part: Part, path: Sequence[str], source: ModelSource) -> Part:
    """A part of a job with another source at `path`."""
    first, *rest = path
    value = _replaced(getattr(part, first), rest, source) if rest else source
    return part.model_copy(update={first: value})


def _named(source: ModelSource, field: str) -> str:
    """The field that names the weights."""
    if source.from_job is not None:
        return f"{field}.from"
    return f"{field}.path" if source.path is not None else f"{field}.init"


def _check_head(role: Role, model: FoundModel, field: str) -> list[FieldProblem]:
    if role == "reward" and model.head == "vocabulary":
        problem = FieldProblem(
            field=field,
            message="this model writes tokens and gives no reward",
            fix="train one with the algorithm reward_model, or name a "
            "...ForSequenceClassification model with one label",
        )
        return [problem]
    if role == "teacher" and model.head == "value":
        problem = FieldProblem(
            field=field,
            message="this is a reward model: it gives numbers, and a teacher says how likely "
            "tokens are",
            fix="name a model that writes tokens",
        )
        return [problem]
    return []


def _check_length(role: Role, config: ModelConfig, spec: JobSpec, field: str) -> list[FieldProblem]:
    longest = spec.training.max_length
    if longest <= config.max_positions:
        return []
    problem = FieldProblem(
        field=field,
        message=f"the {ROLE_NAMES[role]} reads at most {config.max_positions} tokens "
        f"(max_position_embeddings), and training.max_length is {longest}",
        fix=f"set training.max_length to at most {config.max_positions}, or name another model",
    )
    return [problem]


def _check_beside(
    role: Role, model: FoundModel, policy: FoundModel, field: str
) -> list[FieldProblem]:
    problems = []
    if role == "critic":
        problems += _check_architecture(policy.config, model.config, field)
    # A teacher also proposes tokens, so it may know none that the student does not know.
    difference = token_difference(
        Path(policy.resolved.tokenizer),
        Path(model.resolved.tokenizer),
        both_ways=role == "teacher",
    )
    if difference is not None:
        problems.append(
            FieldProblem(
                field=field,
                message=f"the {ROLE_NAMES[role]} has another vocabulary than the model that is "
                f"trained: token id {difference}",
                fix=f"name a {ROLE_NAMES[role]} of the same family, with the same tokenizer",
            )
        )
    return problems


def _check_architecture(own: ModelConfig, others: ModelConfig, field: str) -> list[FieldProblem]:
    """A critic runs in the policy's layout and by its config; only weights may differ."""
    different = [
        f"{each.name} is {getattr(others, each.name)}, not {getattr(own, each.name)}"
        for each in fields(ModelConfig)
        if each.name not in _NOT_ARCHITECTURE
        and getattr(others, each.name) != getattr(own, each.name)
    ]
    if not different:
        return []
    problem = FieldProblem(
        field=field,
        message=f"the critic must be of the policy's architecture: its {'; its '.join(different)}",
        fix="name a model of the policy's config, or null, which takes the policy's own weights",
    )
    return [problem]


def _check_frozen(
    field: str, frozen: FrozenModelSpec, config: ModelConfig, spec: JobSpec
) -> list[FieldProblem]:
    """Whether the layout divides the model, and GPUs can compute it."""
    layout = frozen.layout
    problems = check_tensor_parallel(f"{field}.layout.tp", layout.tp, config)
    problems += check_stages(f"{field}.layout.pp", layout.pp, config.num_layers)
    if spec.resources.gpus_per_node and config.attention_softcap is not None:
        problems.append(
            FieldProblem(
                field=f"{field}.source",
                message=f"a {config.family} model caps attention scores, and Transformer Engine's "
                "attention cannot",
                fix="use resources.gpus_per_node 0, which runs on the CPU, or another model",
            )
        )
    return problems
