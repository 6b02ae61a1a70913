"""B14: reasoning is trained between its tags, where the model is to write it, and read back."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.data.chat import ChatFormat
from algorithms.data.reasoning import ReasoningStyle
from service.spec.rows import Conversation, RowFault, parse_row

QUESTION = {"role": "user", "content": "What is 58 + 26?"}
ANSWER = {"role": "assistant", "content": "It is 84.", "reasoning_content": "58 and 26\nare 84."}
FIELD = "'<|im_start|>assistant\\n' + message.content"

type Make = Callable[[str], ChatFormat]


@pytest.fixture
def chat_of(chatml: PreTrainedTokenizerFast) -> Make:
    """ChatML with another expression for what an assistant's message becomes."""

    def make(expression: str, prompt: str = "") -> ChatFormat:
        copy = PreTrainedTokenizerFast(
            tokenizer_object=chatml.backend_tokenizer,
            eos_token="<|im_end|>",
            additional_special_tokens=["<|im_start|>"],
        )
        template = chatml.chat_template.replace(FIELD, f"'<|im_start|>assistant\\n' + {expression}")
        assert template != chatml.chat_template or expression == "message.content"
        copy.chat_template = template.replace(
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n" + prompt + "' }}",
        )
        return ChatFormat(copy)

    return make


def _thinking(field: str, last_only: bool = False) -> str:
    condition = f"message.{field}" + (" and loop.last" if last_only else "")
    return (
        f"(('<think>\\n' + message.{field} + '\\n</think>\\n\\n') if {condition} else '')"
        " + message.content"
    )


def _split(chat: ChatFormat, *messages: dict[str, Any]) -> tuple[str, list[str]]:
    """The whole text, and each trained piece of it, both from tokens."""
    row = parse_row({"messages": list(messages)})
    assert isinstance(row, Conversation)
    (tokens,) = chat.tokenize([chat.split(row)])
    pairs = zip(tokens.token_ids, tokens.trained, strict=True)
    runs = [(on, [t for t, _ in run]) for on, run in groupby(pairs, key=lambda pair: pair[1])]
    return chat.text(tokens.token_ids), [chat.text(ids) for on, ids in runs if on]


TRAINED = "<think>\n58 and 26\nare 84.\n</think>\n\nIt is 84.<|im_end|>"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", None])
@pytest.mark.parametrize("named", ["reasoning_content", "reasoning", "thinking"])
def test_b14_reasoning_sits_between_the_tags_and_is_read_back(
    chat_of: Make, field: str | None, named: str
) -> None:
    """Whatever the row's name for it, and whether or not the template knows reasoning."""
    chat = chat_of("message.content" if field is None else _thinking(field))
    assert (chat.reasoning.field is None) == (field is None)
    answer = {"role": "assistant", "content": "It is 84.", named: "58 and 26\nare 84."}
    _, (trained,) = _split(chat, QUESTION, answer)
    assert trained == TRAINED
    written = trained.removesuffix("<|im_end|>")
    assert chat.reasoning.read(written) == (ANSWER["reasoning_content"], ANSWER["content"])


def test_b14_a_prompt_that_opens_the_tag(chat_of: Make) -> None:
    """As Qwen3-Thinking's: the tag is the prompt's, and the model's own text begins inside it."""
    tags = "'<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n'"
    always = tags + " + message.content"
    chat = chat_of(always, prompt="<think>\\n")
    text, (trained,) = _split(chat, QUESTION, ANSWER)
    assert trained == TRAINED.removeprefix("<think>\n")
    prompt = text.removesuffix(trained)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert chat.text(chat.prompt([QUESTION])) == prompt
    read = chat.reasoning.read(trained.removesuffix("<|im_end|>"), prompt=prompt)
    assert read == (ANSWER["reasoning_content"], ANSWER["content"])


def test_b14_other_tags_are_the_template_s_own(chat_of: Make) -> None:
    expression = "'[THINK]' + (message.thinking or '') + '[/THINK]' + message.content"
    chat = chat_of(expression)
    style = chat.reasoning
    assert (style.opening, style.closing) == ("[THINK]", "[/THINK]")
    _, (trained,) = _split(chat, QUESTION, ANSWER)
    assert trained == "[THINK]58 and 26\nare 84.[/THINK]It is 84.<|im_end|>"
    assert style.read(trained.removesuffix("<|im_end|>"))[0] == ANSWER["reasoning_content"]


def test_b14_reasoning_outside_the_tags_is_refused(chat_of: Make) -> None:
    """Well where one is shown to a template, and wrong from the second turn on."""
    outside = (
        "((message.reasoning_content + '<think>\\n\\n</think>\\n\\n') if loop.index > 2 else "
        f"({_thinking('reasoning_content')})) + ('' if loop.index < 3 else message.content)"
    )
    chat = chat_of(outside)
    assert _split(chat, QUESTION, ANSWER)[1] == [TRAINED]
    with pytest.raises(RowFault, match=r"reasoning of messages\[3\] between <think> and </think>"):
        _split(chat, QUESTION, ANSWER, QUESTION, ANSWER)


def test_b14_reasoning_that_the_template_drops_is_never_trained_without_it(chat_of: Make) -> None:
    """As Qwen3's: only the last answer keeps its reasoning."""
    chat = chat_of(_thinking("reasoning_content", last_only=True))
    with pytest.raises(RowFault, match=r'reasoning of messages\[1\].*"weight": 0'):
        _split(chat, QUESTION, ANSWER, QUESTION, ANSWER)
    context = {**ANSWER, "weight": 0}
    assert _split(chat, QUESTION, context, QUESTION, ANSWER)[1] == [TRAINED]


def test_b14_several_turns_each_with_its_own(chat_of: Make) -> None:
    chat = chat_of(_thinking("reasoning_content"))
    assert _split(chat, QUESTION, ANSWER, QUESTION, ANSWER)[1] == [TRAINED, TRAINED]


@pytest.mark.parametrize(
    ("answer", "prompt", "read"),
    [
        ("It is 84.", "", ("", "It is 84.")),
        ("<think>a</think>b", "", ("a", "b")),
        ("\n<think>\na\n</think>\n\nb ", "", ("a", "b")),
        ("a</think>b", "...<think>\n", ("a", "b")),
        ("a</think>b", "", ("", "a</think>b")),
        ("b <think>a</think>", "", ("", "b <think>a</think>")),
        ("<think>cut off", "", ("cut off", "")),
        ("<think></think>b", "", ("", "b")),
    ],
)
def test_what_is_reasoning_and_what_is_not(answer: str, prompt: str, read: tuple[str, str]) -> None:
    assert ReasoningStyle().read(answer, prompt=prompt) == read
