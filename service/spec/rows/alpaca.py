"""Alpaca's fields (`instruction`, `input`, `history`, `system`) as OpenAI's messages."""

from collections.abc import Mapping
from typing import Any

from service.spec.rows.faults import RowFault, kind_of
from service.spec.rows.messages import Message


def context_of(row: Mapping[str, Any]) -> list[Message]:
    """What stands before the answer.

    A non-empty `input` follows the instruction on a new line. Earlier turns may stand in `history`
    as [question, answer] pairs, and a system prompt in `system`.

    Raises:
        RowFault: a field has the wrong type.
    """
    messages: list[Message] = []
    system = _text(row, "system")
    if system:
        messages.append({"role": "system", "content": system})
    history = row.get("history") or []
    if not isinstance(history, list):
        raise RowFault(f"`history` is {kind_of(history)}, not a list of [question, answer] pairs")
    for index, turn in enumerate(history):
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise RowFault(f"`history[{index}]` is no pair of strings [question, answer]")
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})
    parts = (_text(row, "instruction"), _text(row, "input"))
    messages.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    return messages


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise RowFault(f"`{name}` is {kind_of(value)}, not a string")
    return value or ""
