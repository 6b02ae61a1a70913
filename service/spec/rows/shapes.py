"""What a row says, once its format no longer matters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

type Kind = Literal["conversation", "preference", "label", "prompt"]
"""The first three are what `AlgorithmSpec.rows` names; a prompt has no answer to train on, only
what verifies one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages ready for a chat template.

    Attributes:
        messages: `content` is a string; `arguments` of a tool call are an object, as templates
            want them, where OpenAI's wire format has a string. Reasoning is in
            `reasoning_content`.
        trained: for each message, whether the assistant wrote it and it is to be learned.
        tools: tool definitions in OpenAI's function format, or empty.
    """

    messages: Sequence[Mapping[str, Any]]
    trained: Sequence[bool]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """A prompt and its answer as strings; `data.strings` says what they become."""

    prompt: str
    answer: str


type Text = Conversation | PlainText


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt; nothing but the answers is trained.

    Attributes:
        chosen: the prompt with the better answer.
        rejected: the same prompt with the other one.
        margin: by how much it is better, where the row says so.
    """

    chosen: Text
    rejected: Text
    margin: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """One answer, and whether it is good; nothing but the answer is trained."""

    answer: Text
    desirable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiablePrompt:
    """A prompt whose answer can be verified."""

    messages: Sequence[Mapping[str, Any]]
    ground_truth: Any
    data_source: str


type Row = Conversation | PlainText | Preference | Labelled | VerifiablePrompt


def kind_of_row(row: Row) -> Kind:
    """What kind a parsed row is of."""
    if isinstance(row, Preference):
        return "preference"
    if isinstance(row, Labelled):
        return "label"
    return "prompt" if isinstance(row, VerifiablePrompt) else "conversation"
