"""The formats that users have, told apart by their fields.

A row is of the format whose fields it has, of all such formats of the one that asks for most:
`messages` with a `label` is a labelled answer and no chat. Where two ask for fields that the other
does not know, nobody can tell what the row means, and it is refused with both names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.spec.rows import alpaca, sharegpt
from service.spec.rows.answers import (
    Prompt,
    answer_messages,
    conversation,
    join,
    last_answer,
    split_pair,
)
from service.spec.rows.faults import RowFault, kind_of, shown
from service.spec.rows.messages import Message, parse_messages, parse_tools
from service.spec.rows.shapes import (
    Conversation,
    Kind,
    Labelled,
    Preference,
    Row,
    Text,
    VerifiablePrompt,
)

type Fields = Mapping[str, Any]

LABELS = ("label", "kto_tag")
"""Two names of one field: whether an answer is good."""
MAX_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: for people.
        kind: of its rows.
        fields: those it is known by; `label` stands for both of `LABELS`.
        parse: reads a row that has them.
    """

    name: str
    kind: Kind
    fields: Sequence[str]
    parse: Callable[[Fields], Row]

    @property
    def needs(self) -> frozenset[str]:
        """Its fields, whatever their order."""
        return frozenset(self.fields)


def format_of(row: Fields) -> Format:
    """The format of a row.

    Raises:
        RowFault: it is of none, or of more than one.
    """
    present = {"label" if name in LABELS else name for name, v in row.items() if v is not None}
    if row.get("messages") is not None and row.get("messages") == row.get("chosen"):
        present.discard("messages")  # UltraFeedback has the better answer twice
    matching = [one for one in FORMATS if one.needs <= present]
    best = [one for one in matching if not any(one.needs < other.needs for other in matching)]
    if len(best) == 1:
        return best[0]
    if best:
        possible = " or ".join(f"{one.name} ({_names(one.fields)})" for one in best)
        raise RowFault(
            f"the row's fields do not tell what it is: {possible}", "remove the fields of the other"
        )
    seen = _names([name for name, value in row.items() if value is not None])
    raise RowFault(
        f"no known format has the row's fields ({seen or 'it has none'})", _nearest(present)
    )


def parse_row(row: Fields) -> Row:
    """Reads a row of any format; fields that its format does not know are left alone.

    Raises:
        RowFault: with the place in the row, and what would be right.
    """
    return format_of(row).parse(row)


def _names(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(f"`{name[:40]}`" for name in names[:MAX_NAMES_SHOWN]) + more


def _nearest(present: set[str]) -> str:
    """What would be right: the rest of a format that the row begins, else all there are."""
    begun = [one for one in FORMATS if one.needs & present]
    if not begun:
        return "use one of: " + "; ".join(_names(one.fields) for one in FORMATS)
    nearest = min(begun, key=lambda one: (len(one.needs - present), -len(one.needs & present)))
    lacking = [name for name in nearest.fields if name not in present]
    return f"for {nearest.name} it lacks {_names(lacking)}"


# The parts that formats are made of. A prompt comes from one of five places.


def _messages_of(row: Fields) -> list[Message]:
    return parse_messages(row["messages"])


def _turns_of(row: Fields) -> list[Message]:
    messages = parse_messages(
        sharegpt.as_messages(row["conversations"], "conversations"), "conversations"
    )
    system = row.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        raise RowFault(f"`system` is {kind_of(system)}, not a string")
    if messages[0]["role"] == "system":
        raise RowFault("both `system` and `conversations` hold a system prompt", "keep one of them")
    return [{"role": "system", "content": system}, *messages]


def _prompt_of(row: Fields) -> Prompt:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return parse_messages(sharegpt.as_messages(prompt, "prompt"), "prompt")


def _tools_of(row: Fields) -> list[Mapping[str, Any]]:
    return parse_tools(row.get("tools"))


def _with_answer(prompt: Prompt, row: Fields, place: str) -> Text:
    return join(prompt, row[place], _tools_of(row), place)


def _pair(prompt: Callable[[Fields], Prompt]) -> Callable[[Fields], Row]:
    def parse(row: Fields) -> Row:
        chosen, rejected = (_with_answer(prompt(row), row, name) for name in ("chosen", "rejected"))
        if type(chosen) is not type(rejected):
            raise RowFault("one of `chosen` and `rejected` is a string, and the other is not")
        return Preference(chosen=chosen, rejected=rejected, margin=_margin(row))

    return parse


def _labelled(answer: Callable[[Fields], Text]) -> Callable[[Fields], Row]:
    def parse(row: Fields) -> Row:
        return Labelled(answer=answer(row), desirable=_label(row))

    return parse


def _margin(row: Fields) -> float | None:
    margin = row.get("margin")
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise RowFault(f"`margin` is {kind_of(margin)}, not a number")
    return float(margin)


def _label(row: Fields) -> bool:
    named = [name for name in LABELS if row.get(name) is not None]
    if len(named) > 1:
        raise RowFault("the row has both `label` and `kto_tag`", "keep one of them")
    value = row[named[0]]
    if not isinstance(value, bool):
        raise RowFault(
            f"`{named[0]}` is {shown(value)}, not true or false",
            "say whether the answer is good; rename the field where it means something else",
        )
    return value


# One function for each way in which a row holds its answers.


def _chat(row: Fields) -> Row:
    return conversation(_messages_of(row), _tools_of(row))


def _sharegpt(row: Fields) -> Row:
    return conversation(_turns_of(row), _tools_of(row))


def _alpaca_messages(row: Fields) -> list[Message]:
    answer = row["output"]
    if not isinstance(answer, str):
        raise RowFault(f"`output` is {kind_of(answer)}, not a string")
    return [*alpaca.context_of(row), {"role": "assistant", "content": answer}]


def _alpaca(row: Fields) -> Row:
    return conversation(_alpaca_messages(row), _tools_of(row))


def _completion(row: Fields) -> Text:
    return _with_answer(_prompt_of(row), row, "completion")


def _implicit_pair(row: Fields) -> Row:
    for name in ("chosen", "rejected"):
        if isinstance(row[name], str):
            raise RowFault(f"`{name}` is a string and there is no prompt", "add `prompt`")
    whole = [answer_messages(row[name], name) for name in ("chosen", "rejected")]
    prompt, chosen, rejected = split_pair(*whole)
    tools = _tools_of(row)
    return Preference(
        chosen=join(prompt, chosen, tools, "chosen"),
        rejected=join(prompt, rejected, tools, "rejected"),
        margin=_margin(row),
    )


def _openai_preference(row: Fields) -> Row:
    source = row["input"]
    if not isinstance(source, dict):
        raise RowFault(f"`input` is {kind_of(source)}, not an object", 'use {"messages": [...]}')
    prompt = parse_messages(source.get("messages"), "input.messages")
    tools = parse_tools(source.get("tools"))
    chosen, rejected = (
        join(prompt, row[name], tools, name)
        for name in ("preferred_output", "non_preferred_output")
    )
    return Preference(chosen=chosen, rejected=rejected, margin=_margin(row))


def _question_and_answer(row: Fields) -> Row:
    text = join(_message_of(row, "question", "user"), row["answer"], (), "answer")
    assert isinstance(text, Conversation)
    return text


def _message_of(row: Fields, name: str, role: str) -> list[Message]:
    if not isinstance(row[name], str):
        raise RowFault(f"`{name}` is {kind_of(row[name])}, not a string")
    return [{"role": role, "content": row[name]}]


def _verl(row: Fields) -> Row:
    prompt, reward = _prompt_of(row), row["reward_model"]
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise RowFault("`reward_model.ground_truth` is missing", "add the right answer")
    if not isinstance(row["data_source"], str):
        raise RowFault(f"`data_source` is {kind_of(row['data_source'])}, not a string")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return VerifiablePrompt(
        messages=messages, ground_truth=reward["ground_truth"], data_source=row["data_source"]
    )


def _format(name: str, kind: Kind, needs: str, parse: Callable[[Fields], Row]) -> Format:
    return Format(name, kind, tuple(needs.split()), parse)


FORMATS: Sequence[Format] = (
    _format("OpenAI chat", "conversation", "messages", _chat),
    _format("ShareGPT", "conversation", "conversations", _sharegpt),
    _format("Alpaca", "conversation", "instruction output", _alpaca),
    _format("prompt and completion", "conversation", "prompt completion", _completion),
    _format("GSM8K", "conversation", "question answer", _question_and_answer),
    _format(
        "OpenAI preference",
        "preference",
        "input preferred_output non_preferred_output",
        _openai_preference,
    ),
    _format("chosen and rejected", "preference", "chosen rejected", _implicit_pair),
    _format("chosen and rejected", "preference", "prompt chosen rejected", _pair(_prompt_of)),
    _format("chosen and rejected", "preference", "messages chosen rejected", _pair(_messages_of)),
    _format("ShareGPT pairs", "preference", "conversations chosen rejected", _pair(_turns_of)),
    _format("Alpaca pairs", "preference", "instruction chosen rejected", _pair(alpaca.context_of)),
    _format(
        "labelled chat",
        "label",
        "messages label",
        _labelled(lambda row: last_answer(_messages_of(row), _tools_of(row))),
    ),
    _format(
        "labelled ShareGPT",
        "label",
        "conversations label",
        _labelled(lambda row: last_answer(_turns_of(row), _tools_of(row))),
    ),
    _format(
        "labelled Alpaca",
        "label",
        "instruction output label",
        _labelled(lambda row: last_answer(_alpaca_messages(row), _tools_of(row))),
    ),
    _format("KTO", "label", "prompt completion label", _labelled(_completion)),
    _format("verl", "prompt", "data_source prompt reward_model", _verl),
)
