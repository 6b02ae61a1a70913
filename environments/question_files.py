"""Reads question files: JSONL or Parquet on the machine that trains, under the operator's roots."""

import json
import os
from collections.abc import Mapping
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOTS_VARIABLE = "PLANISH_DATA_ROOTS"
"""Folders, separated as in PATH, that question files must lie under. Unset: any absolute path;
empty: none."""
MAX_FILE_BYTES = 1 << 30
MAX_ROW_BYTES = 1 << 20
_PARQUET = b"PAR1"


class QuestionFileError(ValueError):
    """A question file that cannot be used. The text names the line, never what stands in it."""


def resolve(path: str) -> Path:
    """The file that a config means.

    A relative path is looked up under each root. Symbolic links are followed before the roots are
    compared, so none leads out of them.

    Raises:
        QuestionFileError: outside the roots, not there, or not a plain file.
    """
    if "\0" in path or ".." in Path(path).parts:
        raise QuestionFileError("the path must not hold '..' or a NUL")
    named = os.environ.get(ROOTS_VARIABLE)
    if named is None and not Path(path).is_absolute():
        raise QuestionFileError(f"the path must be absolute, since {ROOTS_VARIABLE} is not set")
    roots = [Path(root).resolve() for root in (named or "").split(os.pathsep) if root]
    for candidate in [Path(path)] if named is None else [root / path for root in roots]:
        try:
            found = candidate.resolve()
            allowed = named is None or any(found.is_relative_to(root) for root in roots)
            if allowed and found.is_file():
                return found
        except (OSError, RuntimeError):  # a name too long, a folder closed to us, links in a ring
            continue
    if named is None:
        raise QuestionFileError("no file at this path")
    # In the same words for what lies outside, whether something is there or not.
    where = ", ".join(map(str, roots)) or f"any folder: {ROOTS_VARIABLE} is empty"
    raise QuestionFileError(f"no file at this path under the data roots ({where})")


def read_rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The file's rows, kept in memory until the file changes.

    Raises:
        QuestionFileError: too large, or a line that is not a JSON object, with its number.
    """
    try:
        status = path.stat()
        if status.st_size > MAX_FILE_BYTES:
            raise QuestionFileError(f"the file has more than {MAX_FILE_BYTES >> 20} MiB")
        return _read_rows(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise QuestionFileError(f"the file cannot be read: {error.strerror}") from error


@lru_cache(maxsize=4)
def _read_rows(path: Path, modified: int, size: int) -> tuple[Mapping[str, Any], ...]:  # noqa: ARG001
    with path.open("rb") as file:
        parquet = file.read(len(_PARQUET)) == _PARQUET
    rows = _read_parquet(path) if parquet else _read_lines(path)
    if not rows:
        raise QuestionFileError("the file holds no rows")
    return tuple(rows)


def _read_parquet(path: Path) -> list[Mapping[str, Any]]:
    # Few question files are Parquet, and pyarrow takes a while to be imported.
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > MAX_FILE_BYTES:
            raise QuestionFileError(f"unpacked, it has more than {MAX_FILE_BYTES >> 20} MiB")
        rows: list[Mapping[str, Any]] = file.read(use_threads=False).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise QuestionFileError("it is no Parquet file that can be read") from error
    return rows


def _read_lines(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    with path.open("rb") as file:
        # Only \n ends a line: a JSON string may hold U+2028 and its like as they are.
        lines = iter(partial(file.readline, MAX_ROW_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            body = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if body.strip():
                rows.append(_parse_row(body, number))
    return rows


def _parse_row(line: bytes, number: int) -> Mapping[str, Any]:
    if len(line) > MAX_ROW_BYTES:
        raise QuestionFileError(f"line {number} is longer than {MAX_ROW_BYTES >> 20} MiB")
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise QuestionFileError(f"line {number} is not JSON: {error.msg}") from error
    except UnicodeError as error:
        raise QuestionFileError(f"line {number} is not UTF-8 text") from error
    except (RecursionError, ValueError) as error:
        raise QuestionFileError(f"line {number} is not JSON that can be used") from error
    if not isinstance(row, dict):
        raise QuestionFileError(f"line {number} is not a JSON object")
    return row
