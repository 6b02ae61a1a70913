"""ShareGPT's turns (`from`, `value`) as OpenAI's messages."""

import json
from typing import Any

from service.spec.rows.faults import RowFault, kind_of, shown

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_CALL = "function_call"


def as_messages(turns: Any, place: str) -> Any:
    """The turns as messages that are still to be checked (`messages.parse_messages`).

    A turn that is a message already (`role`, `content`) stays as it is.

    Args:
        turns: a list of turns, or a single one.
        place: what to call it in a fault.

    Raises:
        RowFault: a turn is from nobody that is known, or calls a tool in no way that can be read.
    """
    if isinstance(turns, dict):
        turns = [turns]
    if not isinstance(turns, list):
        return turns
    return [_message(turn, f"{place}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: Any, place: str) -> Any:
    if not isinstance(turn, dict) or "role" in turn:
        return turn
    sender, value = turn.get("from"), turn.get("value")
    if not isinstance(sender, str) or (sender != _CALL and sender not in _ROLES):
        raise RowFault(
            f"`{place}.from` is {shown(sender)}", f"use one of: {', '.join([*_ROLES, _CALL])}"
        )
    if not isinstance(value, str):
        raise RowFault(f"`{place}.value` is {kind_of(value)}, not a string")
    kept = {"weight": turn["weight"]} if "weight" in turn else {}
    if sender != _CALL:
        return {"role": _ROLES[sender], "content": value, **kept}
    return {"role": "assistant", "content": None, "tool_calls": _calls(value, place), **kept}


def _calls(value: str, place: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowFault(f"`{place}.value` of a {_CALL} is no JSON ({error})") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RowFault(f"`{place}.value` names no function", 'use {"name": ..., "arguments": ...}')
    return [{"type": "function", "function": call} for call in calls]
