"""A training row: a conversation in OpenAI's chat format, checked and brought into one shape."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages ready for a chat template.

    Attributes:
        messages: `content` is a string; `arguments` of a tool call are an object, as templates
            want them, where OpenAI's wire format has a string.
        trained: for each message, whether the assistant wrote it and it is to be learned.
        tools: tool definitions in OpenAI's function format, or empty.
    """

    messages: Sequence[Mapping[str, Any]]
    trained: Sequence[bool]
    tools: Sequence[Mapping[str, Any]] = ()


def parse_conversation(row: Mapping[str, Any]) -> Conversation:
    """Reads `messages`, and `tools` where there are any; other fields of the row are left alone.

    An assistant message with `"weight": 0` is context only, as in OpenAI's fine-tuning format.

    Raises:
        ValueError: with the place in the row and the fault.
    """
    raw = row.get("messages")
    if not isinstance(raw, list) or not raw:
        raise ValueError("`messages` must be a list with at least one message")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(raw)]
    trained = [
        message["role"] == "assistant" and source.get("weight", 1) != 0
        for message, source in zip(messages, raw, strict=True)
    ]
    if not any(trained):
        raise ValueError("no assistant message to train on")
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("`tools` must be a list of objects")
    return Conversation(messages=messages, trained=trained, tools=tools)


def _message(raw: Any, place: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{place} must be an object, not {type(raw).__name__}")
    role = raw.get("role")
    if role not in ROLES:
        raise ValueError(f"{place}.role is {role!r}; it must be one of {', '.join(sorted(ROLES))}")
    message = {name: value for name, value in raw.items() if name != "weight"}
    calls = raw.get("tool_calls")
    if calls:
        if role != "assistant":
            raise ValueError(f"{place}.tool_calls: only an assistant calls tools")
        if not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls must be a list")
        message["tool_calls"] = [
            _tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    message["content"] = _content(raw.get("content"), f"{place}.content", optional=bool(calls))
    return message


def _content(content: Any, place: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(f"{place} must be a string or a list of text parts")


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'{place} must be {{"type": "function", "function": {{"name", ...}}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{place}.function.arguments is no JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{place}.function.arguments must be an object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
