"""What is wrong with one field of a request, and what to do about it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The fields of a document, so that a problem can say what would be right."""

    descriptions: Mapping[str, str]
    """By path, as `parallel.tp`."""
    children: Mapping[str, Sequence[str]]
    """Names of an object's fields by the object's path; the whole document is ``."""


NO_FIELDS = KnownFields(descriptions={}, children={})


def from_pydantic(
    errors: Iterable[ErrorDetails | Mapping[str, Any]], known: KnownFields = NO_FIELDS
) -> list[FieldProblem]:
    """Pydantic's errors in our shape, one for each field.

    Args:
        errors: from `ValidationError.errors()`.
        known: the fields of the document.
    """
    problems: dict[str, FieldProblem] = {}
    for error in errors:
        problem = _one(error, known)
        earlier = problems.get(problem.field)
        if earlier is not None and earlier.message != problem.message:
            # A field of several types brings one error for each of them.
            problem = problem.model_copy(
                update={"message": f"{earlier.message}; or: {problem.message}"}
            )
        problems[problem.field] = problem
    return list(problems.values())


def _one(error: Mapping[str, Any], known: KnownFields) -> FieldProblem:
    location = tuple(error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        names = known.children.get(field_path(location[:-1]))
        return FieldProblem(
            field=field_path(location),
            message=f"unknown field {quote(str(location[-1]))}",
            fix=f"remove it, or use one of: {', '.join(names)}" if names else "remove it",
        )
    if error["type"] == "missing":
        return FieldProblem(
            field=field_path(location), message="this field is needed", fix="add it"
        )
    path = field_path(location)
    for length in range(len(location), 0, -1):
        # Pydantic names the members of a union in the location, which is no path of a document.
        named = field_path(part for part in location[:length] if isinstance(part, str))
        if named in known.descriptions:
            path = field_path(location[: _index_after(location, length)])
            return FieldProblem(field=path, message=message, fix=known.descriptions[named])
    return FieldProblem(field=path, message=message)


def _index_after(location: tuple[int | str, ...], length: int) -> int:
    """Keeps the list index that follows a field."""
    following = location[length : length + 1]
    return length + 1 if following and isinstance(following[0], int) else length
