"""Reasoning before an answer: how a chat template writes it, and how it is read back.

Templates that know reasoning take it from a field of the message and write it between tags; which
field and which tags is found out by rendering one. For a template that knows none, it is written
into the content between the usual tags, so that it is trained where the model is to write it, and
never outside or left out in silence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.spec.rows.messages import REASONING_FIELDS

_OPEN, _CLOSE = "<think>", "</think>"

type Render = Callable[[Sequence[Mapping[str, Any]]], tuple[str, str]]
"""What stands before the last message's answer, and the whole rendering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """How reasoning is written.

    Attributes:
        field: the field that the template reads; None where it reads none.
        opening: the tag before the reasoning.
        closing: the tag after it.
    """

    field: str | None = None
    opening: str = _OPEN
    closing: str = _CLOSE

    def write(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as the template is to have it."""
        reasoning = message.get("reasoning_content")
        if not reasoning or self.field == "reasoning_content":
            return message
        rest = {name: value for name, value in message.items() if name != "reasoning_content"}
        if self.field is not None:
            return {**rest, self.field: reasoning}
        text = f"{self.opening}\n{reasoning.strip()}\n{self.closing}\n\n"
        return {**rest, "content": text + message["content"].lstrip("\n")}

    def read(self, answer: str, *, prompt: str = "") -> tuple[str, str]:
        """An answer's reasoning and what follows it, without the white space around them.

        Args:
            answer: as the model writes it.
            prompt: what stands before; a template may have opened the tag there.
        """
        opened = prompt.rstrip().endswith(self.opening)
        text = answer.lstrip()
        if not opened and not text.startswith(self.opening):
            return "", answer.strip()
        inside, closed, rest = text.removeprefix(self.opening).partition(self.closing)
        if not closed:
            return inside.strip(), ""
        return inside.strip(), rest.strip()


def find_style(render: Render) -> ReasoningStyle:
    """How a template writes reasoning, found by rendering an answer that has some."""
    question = {"role": "user", "content": "Question"}
    for field in REASONING_FIELDS:
        answer = {"role": "assistant", "content": "Answer", field: "Reasoning"}
        try:
            prefix, text = render([question, answer])
        except ValueError:
            continue
        before, found, after = text[len(prefix) :].partition("Reasoning")
        closing, answered, _ = after.partition("Answer")
        if not text.startswith(prefix) or not found or not answered or not closing.strip():
            continue
        opening = before.strip() or (prefix.split() or [""])[-1]
        return ReasoningStyle(field=field, opening=opening, closing=closing.strip())
    return ReasoningStyle()
