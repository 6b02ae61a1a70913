"""Settings of environments: strict models, and errors that name the field."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

ID_PATTERN = r"^[a-z0-9_]+(/[a-z0-9_]+)+$"
"""The only form of an environment's id: no dots, so no path can hide in one."""

EnvironmentId = Annotated[str, StringConstraints(pattern=ID_PATTERN, max_length=128)]


class EnvironmentConfig(BaseModel):
    """Base of every environment's settings: unknown fields are refused, values never coerced.

    The docstring below a field becomes its description in the schema.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )


class Questions(EnvironmentConfig):
    """Another environment, whose questions and verifier are used."""

    id: EnvironmentId
    """Name in the registry, of an environment with one turn and no tools."""
    version: Annotated[int, Field(ge=1)] | None = None
    """Version in the registry; null takes the newest."""
    config: dict[str, Any] = Field(default_factory=dict)
    """That environment's own settings."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a config: where (field names from the outside in), and what."""

    loc: tuple[str | int, ...]
    message: str


class InvalidConfig(ValueError):
    """A config that an environment refuses.

    Attributes:
        problems: one or more, each with the path of its field.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "; ".join(
                f"{'.'.join(map(str, problem.loc)) or 'config'}: {problem.message}"
                for problem in self.problems
            )
        )

    def under(self, *prefix: str | int) -> "InvalidConfig":
        """The same problems, as seen from a config that holds this one at `prefix`."""
        return InvalidConfig(
            Problem((*prefix, *problem.loc), problem.message) for problem in self.problems
        )


def parse_config[C: BaseModel](model: type[C], config: Mapping[str, Any]) -> C:
    """Checks `config` (JSON values) against an environment's `config_model`.

    Raises:
        InvalidConfig: with the path of every field that is wrong.
    """
    try:
        return model.model_validate(dict(config))
    except ValidationError as error:
        raise InvalidConfig(
            Problem(
                _location(item["loc"], item["msg"], model),
                item["msg"].removeprefix("Value error, "),
            )
            for item in error.errors(include_url=False, include_context=False, include_input=False)
        ) from error


def _location(
    loc: tuple[str | int, ...], message: str, model: type[BaseModel]
) -> tuple[str | int, ...]:
    """Where an error lies; one about the whole model is put at the field its text names first."""
    if loc:
        return loc
    named = [word for word in message.replace(",", " ").split() if word in model.model_fields]
    return (named[0],) if named else ()
