"""Reads a job document: JSON bytes to a JobSpec, or everything that is wrong with them.

The bytes go to pydantic's own JSON reader and not through `json.loads`: it refuses lone surrogates
and deep nesting, which would otherwise come back as a fault of the database.
"""

import math
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from service.spec import JobSpec, algorithm_specs
from service.validation.problems import (
    FieldProblem,
    InvalidRequest,
    KnownFields,
    from_pydantic,
)
from service.validation.repeated_keys import find_repeated_keys


def read_job_spec(body: bytes) -> JobSpec:
    """The job that a request's body describes.

    Raises:
        InvalidRequest: names each field that is wrong.
    """
    try:
        spec = JobSpec.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        known = known_fields(_algorithm_of(body))
        problems = [_readable(problem, known) for problem in from_pydantic(errors, known)]
        raise InvalidRequest(problems) from None
    problems = find_repeated_keys(body)
    problems += [
        FieldProblem(field=path, message=message, fix="use plain JSON values")
        for path, message in _unstorable("", spec.model_dump(by_alias=True))
    ]
    if problems:
        raise InvalidRequest(problems)
    return spec


def _algorithm_of(body: bytes) -> str | None:
    """The installed algorithm that a document, wrong elsewhere, names."""
    try:
        document = from_json(body)
    except ValueError:
        return None
    algorithm = document.get("algorithm") if isinstance(document, dict) else None
    name = algorithm.get("type") if isinstance(algorithm, dict) else None
    return name if isinstance(name, str) and name in algorithm_specs() else None


def _readable(problem: FieldProblem, known: KnownFields) -> FieldProblem:
    """Gives the rules that our own models raise a field and a fix."""
    message = problem.message
    if message.startswith(("unknown algorithm", "give the algorithm's")):
        return problem.model_copy(update={"field": "algorithm.type", "fix": "use one of these"})
    if message.startswith("give exactly one of"):
        return problem.model_copy(update={"fix": "write one of them and leave the others out"})
    if message.startswith("Invalid JSON"):
        return problem.model_copy(update={"fix": "send one JSON object, as docs/job-spec.md shows"})
    field, fix = problem.field, problem.fix
    # A rule over several fields speaks of the first one that it names: "`data` is needed: ...".
    named = f"{field}.{_first_name(message)}".removeprefix(".")
    if named in known.descriptions:
        field, fix = named, known.descriptions[named]
    if " is needed" in message:
        fix = "add it"
    elif " has no use" in message:
        fix = "remove it"
    return problem.model_copy(update={"field": field, "fix": fix})


def _first_name(message: str) -> str:
    quoted = message.split("`")
    return quoted[1] if len(quoted) > 2 else ""


@cache
def known_fields(algorithm: str | None = None) -> KnownFields:
    """The fields of a job document.

    Args:
        algorithm: which one the document names; None takes the fields of all together.
    """
    descriptions: dict[str, str] = {}
    children: dict[str, list[str]] = {}

    def visit(model: type[BaseModel], path: str) -> None:
        fields = {info.alias or name: info for name, info in model.model_fields.items()}
        children[path] = list(dict.fromkeys([*children.get(path, []), *fields]))
        for name, info in fields.items():
            inner_path = f"{path}.{name}" if path else name
            described = " ".join((info.description or "").split())
            descriptions[inner_path] = described or descriptions.get(inner_path, "")
            for inner in _models(info.annotation):
                visit(inner, inner_path)

    visit(JobSpec, "")
    for name, spec in algorithm_specs().items():
        if algorithm in (None, name):
            visit(spec, "algorithm")
    return KnownFields(descriptions=descriptions, children=children)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _unstorable(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Values that JSON readers let through but that are no JSON, or that no database keeps."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if "\0" in key:
                yield path, "a key holds a NUL character"
            yield from _unstorable(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unstorable(f"{path}[{index}]", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, "the number is not finite"
    elif isinstance(value, str) and "\0" in value:
        yield path, "the text holds a NUL character"
