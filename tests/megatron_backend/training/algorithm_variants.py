"""The specs that an algorithm is tested with, made from what its fields say of themselves.

So a new algorithm, or a new option of one, is tested as soon as it is in the registry.
"""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from service.spec import AlgorithmSpec
from service.spec.algorithms.policy_gradient import OverlongPenalty
from service.spec.base import SpecModel
from service.spec.other_models import FrozenModelSpec
from service.spec.parts import ModelSource

# Small groups, and an old policy that is not the current one, where an algorithm has either.
SIZES = {"group_size": 3, "updates_per_rollout": 2}
# Fields that must have a value before another may have one.
COMPANIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"length_constant": 16},
    {"length_constant": None},
    {"ratio": "token"},
    {"ratio": "token", "length_constant": 16},
)
# What cannot be made of defaults alone.
MADE_UP: dict[Any, SpecModel] = {
    FrozenModelSpec: FrozenModelSpec(source=ModelSource(path="/teacher")),
    OverlongPenalty: OverlongPenalty(max_tokens=6, buffer_tokens=4),
}
# They say what is sampled, and not what is made of it.
NOT_IN_THE_MATHS = {"dynamic_sampling", "value_model", "teacher_model"}


def variants(spec: type[AlgorithmSpec]) -> dict[str, AlgorithmSpec]:
    """Specs by a name: `weighted`, with every weight that is 0 by default above 0; `default`, with
    all weights as they are; and `weighted` with each other value of each option. What the spec
    itself refuses is tried on top of `default`, and else left out.
    """
    fields = spec.model_fields
    base = {name: MADE_UP[f.annotation] for name, f in fields.items() if f.is_required()}
    base |= {name: size for name, size in SIZES.items() if name in fields}
    weights = {
        name: 0.3 for name, f in fields.items() if type(f.default) is float and not f.default
    }
    found = {"default": spec(**base)}
    if weights:
        found["weighted"] = spec(**base, **weights)
    for name, field in fields.items():
        if name in {"type", *base, *weights, *NOT_IN_THE_MATHS}:
            continue
        for value in values_of(field.annotation):
            tries = ({**base, **weights, name: value}, {**base, name: value})
            made = None if value == field.default else _first_allowed(spec, tries)
            if made is not None:
                found[f"{name}={_shown(value)}"] = made
    return found


def values_of(annotation: Any) -> Iterator[Any]:
    """The values of a field that have names, and one of each kind that has not."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from values_of(arguments[0])
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from [1.5] if _inner(argument) is float else values_of(argument)
    elif annotation is bool:
        yield from (False, True)
    elif annotation is type(None):
        yield None
    elif annotation in MADE_UP:
        yield MADE_UP[annotation]
    elif isinstance(annotation, type) and issubclass(annotation, SpecModel):
        yield annotation()
        for name, field in annotation.model_fields.items():
            for value in values_of(field.annotation):
                if value != field.default:
                    yield annotation(**{name: value})


def _inner(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _first_allowed(
    spec: type[AlgorithmSpec], tries: tuple[dict[str, Any], ...]
) -> AlgorithmSpec | None:
    for settings in tries:
        for companions in COMPANIONS:
            if companions.keys() - spec.model_fields.keys():
                continue
            try:
                return spec(**{**companions, **settings})
            except ValidationError:
                pass
    return None


def _shown(value: Any) -> str:
    if isinstance(value, SpecModel):
        return ",".join(f"{setting}" for setting in value.model_dump().values())
    return str(value)
