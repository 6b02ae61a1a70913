"""JSON Lines, read by bytes.

A record ends at the byte 0x0A and nowhere else. `str.splitlines` also cuts at U+2028, U+2029 and
U+0085, which are legal inside a JSON string, and makes two broken records of one good one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 16 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowError(ValueError):
    """A row that cannot be used, with its line number, counted from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


def read_jsonl(
    path: str | Path, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number and its JSON object. Blank lines are passed over but counted.

    A byte order mark before the first line and CRLF line ends are accepted.

    Raises:
        RowError: a line is too long, no UTF-8, no JSON object, or holds what no tokenizer can
            take (a lone surrogate, NaN).
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(max_line_bytes + 2):
            number += 1
            body = line.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                body = body.removeprefix(_BYTE_ORDER_MARK)
            if len(body) > max_line_bytes:
                raise RowError(number, f"longer than {max_line_bytes} bytes; split the row")
            if body.strip():
                yield number, _parse(body, number)


def _parse(body: bytes, line: int) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RowError(line, f"not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RowError(line, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise RowError(line, f"a row must be a JSON object, not {type(value).__name__}")
    if b"\\ud" in body.lower():
        _refuse_lone_surrogates(value, line)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _refuse_lone_surrogates(value: dict[str, Any], line: int) -> None:
    """An escape such as \\ud83d without its other half is no character of any text."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(line, "a lone surrogate escape; text must be valid Unicode") from error
