"""Settings of a reasoning-gym dataset as one of our strict models, made from its dataclass.

`seed` and `size` are left out: which items are drawn is the caller's business. The dataset's own
`validate` runs as the model's last check, so what it refuses is refused at submit.
"""

import dataclasses
import datetime
import enum
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Strict, StringConstraints, create_model, model_validator

from environments.config import EnvironmentConfig
from environments.reasoning_gym_datasets import SETTING_PATTERNS

_OURS = frozenset({"seed", "size"})


class DatasetConfig(EnvironmentConfig):
    """Base of every dataset's settings; the dataset's own follow these."""

    dataclass: ClassVar[type[Any]]

    answer_format: Literal["text", "last_line", "answer_tags"] = "text"
    """Which part of the last turn is the answer: all of it, its last line that is not blank, or
    what stands in the last `<answer>...</answer>`."""
    instruction: Annotated[str, StringConstraints(max_length=10_000)] = ""
    """Put below every question, such as how to write the answer."""
    scoring_timeout_seconds: Annotated[float, Field(gt=0, le=300)] = 10.0
    """Seconds after which a scorer is killed and the answer counts as unscorable."""

    @model_validator(mode="after")
    def _dataset_accepts(self) -> "DatasetConfig":
        settings = to_dataclass(self)
        if not hasattr(settings, "validate"):
            return self
        try:
            settings.validate()
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            raise ValueError(str(error) or "refused by the dataset") from error
        return self


def config_model(name: str, dataclass: type[Any]) -> type[DatasetConfig]:
    """A strict model of the settings that a dataset's config dataclass holds."""
    model = create_model(
        f"{dataclass.__name__.removesuffix('Config')}Config",
        __base__=DatasetConfig,
        __doc__=f"Settings of reasoning-gym's dataset {name}.",
        **_fields(dataclass),
    )
    model.dataclass = dataclass
    return model


def to_dataclass(config: DatasetConfig, **ours: int) -> Any:
    """The dataset's own config object; `ours` are `seed` and `size`."""
    names = {field.name for field in dataclasses.fields(config.dataclass)} - _OURS
    settings = {name: _plain(getattr(config, name)) for name in names}
    return config.dataclass(**settings, **ours)


class _Nested(EnvironmentConfig):
    """Base of settings inside settings."""

    dataclass: ClassVar[type[Any]]


def _plain(value: Any) -> Any:
    if isinstance(value, _Nested):
        names = type(value).model_fields
        return value.dataclass(**{name: _plain(getattr(value, name)) for name in names})
    return value


def _fields(dataclass: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(dataclass)
    comments = _comments(dataclass)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(dataclass):
        if field.name in _OURS:
            continue
        default = _default(field)
        annotation = _annotation(hints[field.name], default, SETTING_PATTERNS.get(field.name))
        if default is None:
            annotation = annotation | None
        comment = comments.get(field.name, f"{dataclass.__name__}.{field.name} of the dataset")
        fields[field.name] = (annotation, Field(default=default, description=comment))
    return fields


def _default(field: "dataclasses.Field[Any]") -> Any:
    """The field's default value, a nested dataclass as the model that stands for it."""
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        default = field.default
    else:
        return ...
    default_type: Any = type(default)
    if _is_dataclass(default_type):
        return _nested(default_type)()
    # One dataset writes ("x") where it means ("x",).
    return (default,) if field.type is tuple and isinstance(default, str) else default


def _is_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


@cache
def _nested(dataclass: Any) -> type[_Nested]:
    model = create_model(dataclass.__name__, __base__=_Nested, **_fields(dataclass))
    model.dataclass = dataclass
    return model


def _annotation(hint: Any, default: Any, pattern: str | None) -> Any:
    """The hint as JSON can fill it: lists for tuples, texts for dates and enumerations.

    Some datasets annotate loosely (`tuple` for texts, `list` with a tuple as default, `tuple[str]`
    for any number of them, `int` with a fraction as default), so a default that contradicts its
    hint decides.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is str:
        return Annotated[str, StringConstraints(pattern=pattern, max_length=1000)]
    if {hint, type(default)} == {int, float}:
        return int | float
    if origin in (typing.Union, types.UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return _annotation(inner, default, pattern) | None
    if hint is tuple or origin in (list, tuple, Sequence):
        fixed = origin is tuple and len(arguments) > 1 and arguments[1] is not Ellipsis
        if fixed:
            items = tuple(_annotation(argument, None, pattern) for argument in arguments)
            return Annotated[tuple[items], Strict(False)]  # type: ignore[valid-type]
        element = _annotation(arguments[0] if arguments else str, None, pattern)
        if origin is list and not isinstance(default, tuple):
            return list[element]  # type: ignore[valid-type]
        return Annotated[tuple[element, ...], Strict(False)]  # type: ignore[valid-type]
    if _is_dataclass(hint):
        return _nested(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum | datetime.date | datetime.time):
        return Annotated[hint, Strict(False)]
    return hint


def _comments(dataclass: type[Any]) -> Mapping[str, str]:
    """The comment behind each field in the dataclass's source: the only description there is."""
    pattern = re.compile(r"^\s+(\w+)\s*:[^#\n]*#\s*(.+)$", re.M)
    return dict(pattern.findall(inspect.getsource(dataclass)))
