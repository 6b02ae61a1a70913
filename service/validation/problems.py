"""What is wrong with one field of a request, and what to do about it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import ErrorDetails

MAX_QUOTED = 200


class FieldProblem(BaseModel):
    """One fault in what a user sent."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    field: str
    """Path of the field, as `parallel.tp`; `line 7` for a row of a file; empty for the whole."""
    message: str
    """What is wrong."""
    fix: str | None = None
    """What would be right, where that is known."""


class InvalidRequest(Exception):
    """A request that is refused with everything that is wrong about it."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in problems))
        self.problems = tuple(problems)


def quote(value: str) -> str:
    """A user's value for a message: quoted, escaped, and cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= MAX_QUOTED else shown[:MAX_QUOTED] + "..."


def field_path(location: Iterable[int | str]) -> str:
    """`('evaluation', 'modes', 0)` as `evaluation.modes[0]`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def from_pydantic(
    errors: Iterable[ErrorDetails | Mapping[str, Any]], known_fields: Mapping[str, Sequence[str]]
) -> list[FieldProblem]:
    """Pydantic's errors in our shape.

    Args:
        errors: from `ValidationError.errors()`.
        known_fields: the fields of each object, by its path, to name beside an unknown one.
    """
    return [_one(error, known_fields) for error in errors]


def _one(error: Mapping[str, Any], known_fields: Mapping[str, Sequence[str]]) -> FieldProblem:
    location = tuple(error["loc"])
    path = field_path(location)
    message = str(error["msg"]).removeprefix("Value error, ")
    fix: str | None = None
    if error["type"] == "extra_forbidden":
        parent = field_path(location[:-1])
        message = f"unknown field {quote(str(location[-1]))}"
        known = known_fields.get(parent)
        fix = f"remove it, or use one of: {', '.join(known)}" if known else "remove it"
    elif error["type"] == "missing":
        message, fix = "this field is needed", "add it"
    return FieldProblem(field=path, message=message, fix=fix)
