"""How a row of each format is read, once its fields have told which it is.

A prompt comes from one of five places, an answer is held in one of five ways; each format is one of
each. All raise RowFault with the place in the row.
"""

from collections.abc import Mapping
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
    Labelled,
    Preference,
    Row,
    Text,
    VerifiablePrompt,
)

type Fields = Mapping[str, Any]

LABELS = ("label", "kto_tag")
"""Two names of one field: whether an answer is good."""


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


def _alpaca_messages(row: Fields) -> list[Message]:
    answer = row["output"]
    if not isinstance(answer, str):
        raise RowFault(f"`output` is {kind_of(answer)}, not a string")
    return [*alpaca.context_of(row), {"role": "assistant", "content": answer}]


def _prompt_of(row: Fields) -> Prompt:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return parse_messages(sharegpt.as_messages(prompt, "prompt"), "prompt")


def _tools_of(row: Fields) -> list[Mapping[str, Any]]:
    return parse_tools(row.get("tools"))


def _pair(prompt: Prompt, row: Fields) -> Preference:
    tools = _tools_of(row)
    chosen, rejected = (join(prompt, row[name], tools, name) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise RowFault("one of `chosen` and `rejected` is a string, and the other is not")
    return Preference(chosen=chosen, rejected=rejected, margin=_margin(row))


def _labelled(answer: Text, row: Fields) -> Labelled:
    return Labelled(answer=answer, desirable=_label(row))


def _margin(row: Fields) -> float | None:
    margin = row.get("margin")
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise RowFault(f"`margin` is {kind_of(margin)}, not a number")
    try:
        return float(margin)
    except OverflowError:
        raise RowFault("`margin` is out of range", "use a smaller one") from None


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


def chat(row: Fields) -> Row:
    """OpenAI chat."""
    return conversation(_messages_of(row), _tools_of(row))


def turns(row: Fields) -> Row:
    """ShareGPT."""
    return conversation(_turns_of(row), _tools_of(row))


def instruction(row: Fields) -> Row:
    """Alpaca."""
    return conversation(_alpaca_messages(row), _tools_of(row))


def completion(row: Fields) -> Text:
    """A prompt and its completion."""
    return join(_prompt_of(row), row["completion"], _tools_of(row), "completion")


def question(row: Fields) -> Row:
    """GSM8K's questions and answers."""
    for name in ("question", "answer"):
        if not isinstance(row[name], str):
            raise RowFault(f"`{name}` is {kind_of(row[name])}, not a string")
    return join([{"role": "user", "content": row["question"]}], row["answer"], (), "answer")


def openai_pair(row: Fields) -> Row:
    """OpenAI preference."""
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


def implicit_pair(row: Fields) -> Row:
    """Two whole conversations; what both begin with is the prompt."""
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


def prompt_pair(row: Fields) -> Row:
    """Two answers to `prompt`."""
    return _pair(_prompt_of(row), row)


def chat_pair(row: Fields) -> Row:
    """Two answers to a chat."""
    return _pair(_messages_of(row), row)


def turns_pair(row: Fields) -> Row:
    """LLaMA-Factory's two answers to ShareGPT's turns."""
    return _pair(_turns_of(row), row)


def instruction_pair(row: Fields) -> Row:
    """LLaMA-Factory's two answers to Alpaca's instruction."""
    return _pair(alpaca.context_of(row), row)


def labelled_completion(row: Fields) -> Row:
    """KTO."""
    return _labelled(completion(row), row)


def labelled_chat(row: Fields) -> Row:
    """A chat whose last answer has a label."""
    return _labelled(last_answer(_messages_of(row), _tools_of(row)), row)


def labelled_turns(row: Fields) -> Row:
    """The same in ShareGPT's turns."""
    return _labelled(last_answer(_turns_of(row), _tools_of(row)), row)


def labelled_instruction(row: Fields) -> Row:
    """The same in Alpaca's fields."""
    return _labelled(last_answer(_alpaca_messages(row), _tools_of(row)), row)


def verl(row: Fields) -> Row:
    """verl's prompts, with what verifies an answer."""
    prompt, reward = _prompt_of(row), row["reward_model"]
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise RowFault("`reward_model.ground_truth` is missing", "add the right answer")
    if not isinstance(row["data_source"], str):
        raise RowFault(f"`data_source` is {kind_of(row['data_source'])}, not a string")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return VerifiablePrompt(
        messages=messages, ground_truth=reward["ground_truth"], data_source=row["data_source"]
    )
