"""Messages in OpenAI's chat format, checked and brought into one shape."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from service.spec.rows.faults import RowFault, kind_of, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""What others call the text that a model thinks before it answers."""

type Message = dict[str, Any]


def parse_messages(raw: Any, place: str = "messages") -> list[Message]:
    """Checked messages; each keeps its `weight`, see `take_weights`.

    Args:
        raw: what the row has.
        place: what to call it in a fault.

    Raises:
        RowFault: with the place in the row.
    """
    if not isinstance(raw, list):
        raise RowFault(f"`{place}` is {kind_of(raw)}, not a list", "make it a list of messages")
    if not raw:
        raise RowFault(f"`{place}` is empty", "give at least one message")
    return [_message(message, f"{place}[{index}]") for index, message in enumerate(raw)]


def take_weights(messages: Sequence[Message]) -> list[bool]:
    """For each message, whether the assistant wrote it and it is not context only.

    `"weight": 0` makes it context, as in OpenAI's fine-tuning format. Templates never see weights.
    """
    return [
        message.pop("weight", None) in (None, 1) and message["role"] == "assistant"
        for message in messages
    ]


def parse_tools(raw: Any) -> list[Mapping[str, Any]]:
    """Tool definitions in OpenAI's format, from a list or from JSON in a string.

    A bare function (`name`, `parameters`), as LLaMA-Factory's files have it, is wrapped.

    Raises:
        RowFault: they are no list of objects.
    """
    if isinstance(raw, str) and raw.strip():
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RowFault(f"`tools` is a string that is no JSON ({error})") from None
    if not raw:
        return []
    if not isinstance(raw, list) or not all(isinstance(tool, dict) for tool in raw):
        raise RowFault("`tools` is no list of objects", "use OpenAI's tool format, or leave it out")
    return [_tool(tool) for tool in raw]


def _tool(tool: dict[str, Any]) -> Mapping[str, Any]:
    bare = "function" not in tool and "name" in tool
    return {"type": "function", "function": tool} if bare else tool


def _message(raw: Any, place: str) -> Message:
    if not isinstance(raw, dict):
        raise RowFault(f"`{place}` is {kind_of(raw)}, not an object", 'use {"role", "content"}')
    role = raw.get("role")
    if role not in ROLES:
        raise RowFault(f"`{place}.role` is {shown(role)}", f"use one of: {', '.join(ROLES)}")
    message = {name: value for name, value in raw.items() if value is not None}
    if message.get("weight", 1) not in (0, 1):
        raise RowFault(f"`{place}.weight` is {shown(message['weight'])}", "use 0 or 1")
    if "function_call" in message:
        raise RowFault(f"`{place}.function_call` is OpenAI's old format", "use `tool_calls`")
    calls = message.pop("tool_calls", None)
    if calls is not None and role != "assistant":
        raise RowFault(f"`{place}.tool_calls` in a message of the role {role}", "remove it")
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    _take_reasoning(message, place)
    message["content"] = _content(
        raw.get("content"), f"{place}.content", optional="tool_calls" in message
    )
    return message


def _take_reasoning(message: Message, place: str) -> None:
    named = [name for name in REASONING_FIELDS if name in message]
    if not named:
        return
    texts = [message.pop(name) for name in named]
    if message["role"] != "assistant":
        raise RowFault(f"`{place}.{named[0]}` in a message that no assistant wrote", "remove it")
    if not all(isinstance(text, str) for text in texts):
        raise RowFault(f"`{place}.{named[0]}` is {kind_of(texts[0])}, not a string")
    if len(set(texts)) > 1:
        raise RowFault(f"`{place}` has different {' and '.join(named)}", "keep one of them")
    if texts[0].strip():
        message["reasoning_content"] = texts[0]


def _content(content: Any, place: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise RowFault(f"`{place}` is missing", "give a string")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise RowFault(
        f"`{place}` is {kind_of(content)}, not a string or a list of text parts", "give a string"
    )


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowFault(f"`{place}` is {kind_of(calls)}, not a list of calls")
    return [parse_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def parse_call(call: Any, place: str) -> dict[str, Any]:
    """One call of a tool, with its arguments as an object.

    Raises:
        RowFault: it names no function, or its arguments are no object.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault(
            f"`{place}` names no function",
            'use {"type": "function", "function": {"name": ..., "arguments": ...}}',
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RowFault(f"`{place}.function.arguments` is no JSON ({error})") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowFault(f"`{place}.function.arguments` is {kind_of(arguments)}, not an object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
