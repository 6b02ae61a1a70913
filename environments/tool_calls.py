"""Reads the tool calls that a policy wrote, in the Hermes and Qwen style.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The text comes from a model
under training, so anything can be in it: every fault of form becomes one message in `errors`, which
the environment can show to the policy, and nothing raises.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Never

from environments.protocol import ToolCall

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MAX_CALL_CHARACTERS = 65_536
MAX_CALLS = 64
MAX_DEPTH = 32
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A turn's text, taken apart.

    Attributes:
        content: the text outside the calls; as written where no call was begun, else stripped.
        calls: the calls that parsed, in order.
        errors: one message for each call that did not.
    """

    content: str
    calls: list[ToolCall]
    errors: list[str]


class _Malformed(ValueError):
    """Why one call did not parse, in words for the policy."""


def parse(text: str, *, id_prefix: str = "call") -> ParsedTurn:
    """Takes a turn's decoded text apart.

    Args:
        text: what the policy wrote, without the end-of-turn token.
        id_prefix: the calls get the ids `{id_prefix}_0`, `{id_prefix}_1`, ...; give each turn of an
            episode its own prefix where ids must differ over the whole conversation.
    """
    outside: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        if len(calls) + len(errors) == MAX_CALLS:
            errors.append(f"more than {MAX_CALLS} tool calls in one turn; the others are not read")
            break
        outside.append(text[position:start])
        body = start + len(OPEN)
        # A string in the arguments may hold the closing tag, so JSON is read before it is sought.
        try:
            call, end = _read_call(text, body, f"{id_prefix}_{len(calls)}")
            calls.append(call)
            position = end
        except _Malformed as error:
            errors.append(f"malformed tool call: {error}")
            position = _resume(text, body)
    if not calls and not errors:
        return ParsedTurn(content=text, calls=[], errors=[])
    outside.append(text[position:])
    return ParsedTurn(content="".join(outside).strip(), calls=calls, errors=errors)


def _read_call(text: str, start: int, call_id: str) -> tuple[ToolCall, int]:
    """The call whose JSON begins at or after `start`, and the position behind its closing tag."""
    begin = _skip_space(text, start)
    value, length = _decode(text[begin : begin + MAX_CALL_CHARACTERS])
    end = _skip_space(text, begin + length)
    if not text.startswith(CLOSE, end):
        raise _Malformed(f"no {CLOSE} after the JSON object")
    if not isinstance(value, dict):
        raise _Malformed('expected a JSON object with "name" and "arguments"')
    if unknown := sorted(set(value) - {"name", "arguments", "id"}):
        raise _Malformed(f"unknown key {unknown[0]!r}; only name and arguments belong there")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Malformed('"name" must be a string')
    return ToolCall(id=call_id, name=name, arguments=_arguments(value)), end + len(CLOSE)


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments; OpenAI writes them as a string that holds JSON, which is taken too."""
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments, length = _decode(arguments)
        if _skip_space(call["arguments"], length) != len(call["arguments"]):
            raise _Malformed('"arguments" holds more than one JSON object')
    if not isinstance(arguments, dict):
        raise _Malformed('"arguments" must be a JSON object')
    return arguments


def _decode(source: str) -> tuple[Any, int]:
    """The JSON value at the start of `source`, and its length."""
    try:
        value, length = _DECODER.raw_decode(source)
        _check_depth(value)
        # A lone surrogate is a fine Python string, but can be written nowhere.
        source[:length].encode()
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _Malformed(f"not valid JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise _Malformed("JSON is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise _Malformed("JSON holds half of a surrogate pair") from error
    except ValueError as error:
        raise _Malformed("JSON holds a number that is out of range") from error
    return value, length


def _check_depth(value: Any) -> None:
    """Raises RecursionError long before Python's own limit: others will walk this value, too."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = (item for item in level if isinstance(item, dict | list))
        level = [
            child
            for item in nested
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise RecursionError


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(literal)
    return number


def _no_constant(literal: str) -> Never:
    raise ValueError(literal)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _resume(text: str, body: int) -> int:
    """Where reading goes on after a malformed call: behind its closing tag, or at the next call."""
    close = text.find(CLOSE, body)
    following = text.find(OPEN, body)
    if close >= 0 and (following < 0 or close < following):
        return close + len(CLOSE)
    return following if following >= 0 else len(text)


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
