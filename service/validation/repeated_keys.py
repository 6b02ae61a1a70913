"""Keys that occur twice in one object of a JSON text.

JSON readers keep one of the two and say nothing, so half of what was written would be lost unseen.
"""

import json
from collections.abc import Iterator
from typing import Any

from service.validation.problems import FieldProblem


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys came more than once."""

    repeated: frozenset[str]


def _remember(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    names = [name for name, _ in pairs]
    unique = len(found) == len(names)
    found.repeated = frozenset() if unique else frozenset(n for n in found if names.count(n) > 1)
    return found


def find_repeated_keys(body: bytes) -> list[FieldProblem]:
    """A problem for each key that occurs twice, with the key's path.

    Args:
        body: JSON that another reader took already.
    """
    return list(_walk("", json.loads(body, object_pairs_hook=_remember)))


def _walk(path: str, value: Any) -> Iterator[FieldProblem]:
    if isinstance(value, _Object):
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else key
            if key in value.repeated:
                yield FieldProblem(
                    field=inner_path,
                    message="this key occurs more than once in one object",
                    fix="keep one of them",
                )
            yield from _walk(inner_path, inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(f"{path}[{index}]", inner)
