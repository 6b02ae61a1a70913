"""Reads job files: YAML 1.2, of which JSON is a part.

PyYAML follows YAML 1.1, where `1e-5` is a string, `no` is a boolean and `1:30` is a number. Job
files are sent as JSON, so scalars are read as YAML 1.2's core schema says, which is like JSON, and
a key that occurs twice is refused.
"""

import math
import re
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1024 * 1024
_MAX_DIGITS = 1000


class BadDocument(Exception):
    """The file is no job document."""


class _Loader(yaml.SafeLoader):
    """Scalars by YAML 1.2's core schema."""

    # PyYAML reads the rules from the class; these begin empty, without YAML 1.1's.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INT = re.compile(r"[-+]?[0-9]+")

for _tag, _pattern, _first in (
    ("null", re.compile(r"null|Null|NULL|~|"), ["n", "N", "~", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"<<"), ["<"]),
):
    # `add_implicit_resolver` asks for a match, not a full match: the end is part of the pattern.
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern.pattern})\Z"), _first
    )


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is no string", key_node.start_mark
            )
        if key in found:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} occurs twice", key_node.start_mark
            )
        found[key] = loader.construct_object(value_node, deep=True)
    return found


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    number = float(str(loader.construct_scalar(node)))
    if not math.isfinite(number):
        raise yaml.constructor.ConstructorError(
            None, None, f"{node.value} is out of range", node.start_mark
        )
    return number


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits = str(loader.construct_scalar(node))
    if len(digits) > _MAX_DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, "the number has too many digits", node.start_mark
        )
    return int(digits)


def _str(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise yaml.constructor.ConstructorError(
            None, None, "the text holds half of a surrogate pair", node.start_mark
        )
    return text


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:str", _str)


def read_document(path: Path) -> dict[str, Any]:
    """The one document of a job file.

    Raises:
        BadDocument: it cannot be read, with line and column where that is known.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadDocument(f"{path} is larger than {MAX_BYTES} bytes, so it is no job file")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadDocument(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadDocument(f"{path} is not UTF-8 at byte {error.start + 1}") from None
    try:
        found = yaml.load(text, Loader=_Loader)  # a SafeLoader: makes plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise BadDocument(f"{path}{where}: {what}") from None
    except RecursionError:
        raise BadDocument(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadDocument(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise BadDocument(f"{path} holds no mapping; a job file begins as in docs/job-spec.md")
    return found
