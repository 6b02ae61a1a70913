r"""Reads server-sent events.

Messages are split at the byte `\n`, not with `str.splitlines` (as httpx's `iter_lines` does): the
data is JSON and may hold U+2028 raw, which is no line end here.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One server-sent event with JSON data."""

    event: str
    """`message` where the server named none."""
    id: str | None
    data: Any


def read_messages(chunks: Iterable[bytes]) -> Iterator[Message]:
    """Messages of a stream; one that was cut off at the end is left out."""
    event, identifier, data = "message", None, list[str]()
    for line in _lines(chunks):
        if not line:
            if data:
                yield Message(event, identifier, json.loads("\n".join(data)))
            event, identifier, data = "message", None, []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            event = value
        elif name == "id":
            identifier = value
        elif name == "data":
            data.append(value)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8")
