"""Alpaca rows (`instruction`, `input`, `output`) as conversations."""

from collections.abc import Mapping
from typing import Any


def alpaca_to_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same row with `messages`: one question and its answer.

    A non-empty `input` follows the instruction on a new line. Earlier turns may stand in `history`
    as [question, answer] pairs, and a system prompt in `system`.

    Raises:
        ValueError: `instruction` or `output` is missing or no string.
    """
    for name in ("instruction", "output"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"`{name}` must be a string")
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": row["system"]})
    for question, answer in row.get("history") or []:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    question = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": row["output"]})
    return {"messages": messages}
