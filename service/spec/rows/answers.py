"""A prompt and its answer, each a string or messages, as one text with only the answer trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.spec.rows import sharegpt
from service.spec.rows.faults import RowFault, kind_of, shown
from service.spec.rows.messages import Message, parse_messages, take_weights
from service.spec.rows.shapes import Conversation, PlainText, Text

type Prompt = str | Sequence[Message]
"""As the row has it, its messages checked."""


def conversation(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """A whole chat, all of the assistant's messages trained but those of weight 0.

    Raises:
        RowFault: there is nothing to train on.
    """
    trained = take_weights(messages)
    if not any(trained):
        raise RowFault(
            "no message has the role assistant and a weight other than 0, so there is nothing to "
            "train on",
            "add the assistant's answer",
        )
    return Conversation(messages=messages, trained=trained, tools=tools)


def last_answer(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """A chat of which only the last message is trained: what a label speaks of.

    Raises:
        RowFault: the assistant did not write it.
    """
    take_weights(messages)
    if messages[-1]["role"] != "assistant":
        raise RowFault(
            f"the last message is of the role {messages[-1]['role']}, so there is no answer",
            "end with the assistant's answer",
        )
    trained = [False] * (len(messages) - 1) + [True]
    return Conversation(messages=messages, trained=trained, tools=tools)


def join(prompt: Prompt, answer: Any, tools: Sequence[Mapping[str, Any]], place: str) -> Text:
    """A prompt and one answer.

    Args:
        prompt: what is answered.
        answer: a string, a message or a list of them, in OpenAI's format or ShareGPT's.
        tools: definitions for the template.
        place: the answer's name in the row.

    Raises:
        RowFault: the two do not fit each other.
    """
    if isinstance(answer, str):
        if isinstance(prompt, str):
            return PlainText(prompt=prompt, answer=answer)
        messages = [{"role": "assistant", "content": answer}]
        return _joined(prompt, messages, tools, place)
    messages = answer_messages(answer, place)
    if isinstance(prompt, str):
        prompt = _prompt_of_string(prompt, messages, place)
    if messages[0]["role"] != "assistant":
        messages = _behind(prompt, messages, place)
    return _joined(prompt, messages, tools, place)


def answer_messages(raw: Any, place: str) -> list[Message]:
    """An answer's messages, checked."""
    if isinstance(raw, int | float) or raw is None:
        raise RowFault(f"`{place}` is {kind_of(raw)}, not a string or a list of messages")
    return parse_messages(sharegpt.as_messages(raw, place), place)


def split_pair(
    chosen: Sequence[Message], rejected: Sequence[Message]
) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """The messages that two whole conversations begin with, and what is left of each.

    Both rests begin with the assistant's message, and neither is empty.

    Raises:
        RowFault: they differ first in what no assistant wrote, or have no prompt at all.
    """
    pairs = list(zip(chosen, rejected, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if same == min(len(chosen), len(rejected)):
        same -= 1  # one is the beginning of the other, or they are equal
        while same > 0 and chosen[same]["role"] != "assistant":
            same -= 1
    roles = (chosen[same]["role"], rejected[same]["role"])
    if roles != ("assistant", "assistant"):
        raise RowFault(
            f"`chosen` and `rejected` differ at message {same} already, which no assistant wrote: "
            f"it is of the roles {roles[0]} and {roles[1]}",
            "both must answer the same prompt",
        )
    if same == 0:
        raise RowFault("`chosen` and `rejected` have no prompt in common", "add `prompt`")
    return chosen[:same], chosen[same:], rejected[same:]


def _prompt_of_string(prompt: str, answer: Sequence[Message], place: str) -> Sequence[Message]:
    """A string beside an answer of messages: a user's turn, which the answer may repeat."""
    if answer[0]["role"] == "assistant":
        return [{"role": "user", "content": prompt}]
    asked = next((i for i, m in enumerate(answer) if m["role"] == "user"), None)
    if asked is None or answer[asked]["content"] != prompt:
        raise RowFault(
            f"`{place}` begins with a message of the role {answer[0]['role']}, but its user's "
            "message is not the `prompt`",
            "let it begin with the assistant's answer, or leave `prompt` out",
        )
    return answer[: asked + 1]


def _behind(prompt: Sequence[Message], answer: Sequence[Message], place: str) -> list[Message]:
    """An answer without the prompt that it repeats."""
    if [*answer[: len(prompt)]] != [*prompt] or len(answer) == len(prompt):
        raise RowFault(
            f"`{place}` begins with a message of the role {shown(answer[0]['role'])}, and does not "
            "repeat the prompt",
            "let it begin with the assistant's answer",
        )
    return list(answer[len(prompt) :])


def _joined(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    place: str,
) -> Conversation:
    if answer[0]["role"] != "assistant":
        raise RowFault(f"`{place}` begins with a message of the role {answer[0]['role']}")
    before = [dict(message) for message in prompt]  # the other answer of a pair has it too
    after = [dict(message) for message in answer]
    take_weights(before)
    trained = [False] * len(before) + take_weights(after)
    if not any(trained):
        raise RowFault(f"`{place}` has no message to train on")
    return Conversation(messages=[*before, *after], trained=trained, tools=tools)
