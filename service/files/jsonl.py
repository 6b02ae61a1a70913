r"""Checks an uploaded JSONL file of chat rows, line by line.

A line ends at the byte `\n` and nowhere else. Python's `str.splitlines` also cuts at U+2028, U+2029
and U+0085, which JSON allows raw inside a string, so it would cut one row into two broken ones.
A `\r` before the `\n` is white space to JSON, and a byte order mark is let pass at the very start.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from service.validation.problems import FieldProblem, quote

MAX_LISTED = 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(slots=True)
class Report:
    """What a check of a file found."""

    rows: int = 0
    bad_rows: int = 0
    problems: list[FieldProblem] = field(default_factory=list)
    """The first 20 of them."""

    def add(self, line: int, message: str, fix: str | None = None) -> None:
        """Notes a bad line (the first is 1)."""
        self.bad_rows += 1
        if len(self.problems) < MAX_LISTED:
            self.problems.append(FieldProblem(field=f"line {line}", message=message, fix=fix))


class _BadRow(Exception):
    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


def check_chat_rows(path: Path, *, max_line_bytes: int) -> Report:
    """Checks that each line is an object with `messages` that can be trained on.

    Args:
        path: the file.
        max_line_bytes: longest line that is accepted, in bytes without its line end.
    """
    report = Report()
    with path.open("rb") as file:
        for number, line, terminated in _lines(file, max_line_bytes):
            if line is None:
                report.add(
                    number,
                    f"the line is longer than {max_line_bytes} bytes",
                    "split the conversation, or ask the operator for a higher limit",
                )
                continue
            if not line.strip(b" \t\r"):
                if terminated:
                    report.add(number, "the line is blank", "remove it")
                continue
            try:
                _check_row(line, terminated)
            except _BadRow as bad:
                report.add(number, bad.message, bad.fix)
            else:
                report.rows += 1
    if not report.rows and not report.bad_rows:
        report.problems.append(
            FieldProblem(field="file", message="the file is empty", fix="send one row a line")
        )
    return report


def _lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None, bool]]:
    r"""Yields (number, line without `\n` or None where it is too long, whether it had a `\n`)."""
    number = 0
    while True:
        # One byte more for the line end; on line 1 three more for the byte order mark.
        line = file.readline(limit + 1 + (len(BYTE_ORDER_MARK) if number == 0 else 0))
        if not line:
            return
        number += 1
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        terminated = line.endswith(b"\n")
        body = line.removesuffix(b"\n")
        if len(body) > limit:
            while not terminated and (rest := file.readline(limit)):
                terminated = rest.endswith(b"\n")
            yield number, None, terminated
        else:
            yield number, body, terminated


def _refuse_constant(name: str) -> None:
    raise _BadRow(f"{name} is no JSON number", "use null or a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _BadRow(f"the number {quote(text)} is out of range", "use a smaller one")
    return number


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _BadRow(f"the key {quote(twice)} occurs twice in one object", "keep one of them")
    return row


def _check_row(line: bytes, terminated: bool) -> None:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 at byte {error.start + 1} of the line", "save as UTF-8") from None
    try:
        row = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_refuse_duplicates,
        )
    except json.JSONDecodeError as error:
        cut = "" if terminated else "; the file ends in this line, so the upload may be cut off"
        raise _BadRow(
            f"not JSON: {error.msg} at column {error.colno}{cut}", "write one JSON object a line"
        ) from None
    except RecursionError:
        raise _BadRow("nested too deeply", "flatten it") from None
    except ValueError:  # an integer with more digits than Python converts
        raise _BadRow("a number has too many digits", "write it as a string") from None
    if "\\u" in text:  # surrogates can only come from escapes: the bytes were valid UTF-8
        _refuse_lone_surrogates(row)
    if not isinstance(row, dict):
        raise _BadRow(
            f"the row is {_kind(row)}, not an object", 'write {"messages": [...]} on each line'
        )
    _check_messages(row)


def _refuse_lone_surrogates(row: Any) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRow(
            "a lone surrogate (one half of a pair like \\ud83d\\ude00) in a string",
            "write both halves, or the character itself in UTF-8",
        ) from None


def _check_messages(row: dict[str, Any]) -> None:
    if "messages" not in row:
        raise _BadRow("the row has no `messages`", 'write {"messages": [...]} on each line')
    messages = row["messages"]
    if not isinstance(messages, list):
        raise _BadRow(f"`messages` is {_kind(messages)}, not a list", "make it a list of messages")
    if not messages:
        raise _BadRow("`messages` is empty", "give at least a user and an assistant message")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    if not any(message["role"] == "assistant" for message in messages):
        raise _BadRow(
            "no message has the role assistant, so there is nothing to train on",
            "add the assistant's answer",
        )
    tools = row.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
    ):
        raise _BadRow("`tools` is no list of objects", "use OpenAI's tool format, or leave it out")


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise _BadRow(f"`{where}` is {_kind(message)}, not an object", 'use {"role", "content"}')
    role = message.get("role")
    if role not in ROLES:
        raise _BadRow(f"`{where}.role` is {quote_json(role)}", f"use one of: {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise _BadRow(f"`{where}.tool_calls` in a message of the role {role}", "remove it")
        _check_tool_calls(f"{where}.tool_calls", calls)
    content = message.get("content")
    if isinstance(content, str) or (content is None and calls):
        return
    if content is None:
        raise _BadRow(f"`{where}.content` is missing", "give a string")
    raise _BadRow(f"`{where}.content` is {_kind(content)}, not a string", "give a string")


def _check_tool_calls(where: str, calls: Any) -> None:
    fix = 'use [{"type": "function", "function": {"name": ..., "arguments": ...}}]'
    if not isinstance(calls, list) or not calls:
        raise _BadRow(f"`{where}` is no list of calls", fix)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _BadRow(f"`{where}[{index}]` names no function", fix)
        if not isinstance(function.get("arguments", ""), str | dict):
            raise _BadRow(f"`{where}[{index}].function.arguments` is no string or object", fix)


def quote_json(value: Any) -> str:
    """A JSON value for a message, cut where it is long."""
    return "missing" if value is None else quote(value) if isinstance(value, str) else _kind(value)


def _kind(value: Any) -> str:
    """A JSON value's type, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"
