"""Which tokens the assistant wrote, checked by decoding them."""

from itertools import groupby
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.data.chat import ChatFormat, TokenizedChat
from service.spec.rows import Conversation, parse_row

QUESTION = {"role": "user", "content": "What is 58 + 26?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": "58 + 26"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "84"}
ANSWER = {"role": "assistant", "content": "It is 84."}
CALL_TEXT = '<tool_call>{"name": "calculator", "arguments": {"expression": "58 + 26"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]


def _trained_texts(chat: ChatFormat, tokens: TokenizedChat) -> list[str]:
    """Text of each run of trained tokens."""
    pairs = zip(tokens.token_ids, tokens.trained, strict=True)
    runs = [(on, [t for t, _ in run]) for on, run in groupby(pairs, key=lambda pair: pair[1])]
    return [chat.text(ids) for on, ids in runs if on]


def _tokenize(chat: ChatFormat, conversation: Conversation) -> TokenizedChat:
    (tokens,) = chat.tokenize([chat.split(conversation)])
    return tokens


def _row(*messages: dict[str, Any], **fields: Any) -> Conversation:
    row = parse_row({"messages": list(messages), **fields})
    assert isinstance(row, Conversation)
    return row


def test_b01_the_mask_is_the_answer_and_the_end_of_turn(chatml: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(chatml)
    tokens = _tokenize(chat, _row(QUESTION, ANSWER))
    assert chat.text(tokens.token_ids) == (
        "<|im_start|>user\nWhat is 58 + 26?<|im_end|>\n<|im_start|>assistant\nIt is 84.<|im_end|>"
    )
    assert _trained_texts(chat, tokens) == ["It is 84.<|im_end|>"]


def test_b01_several_turns_with_a_tool(chatml: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(chatml)
    system = {"role": "system", "content": "Be right."}
    tokens = _tokenize(chat, _row(system, QUESTION, CALL, RESULT, ANSWER, tools=TOOLS))
    assert _trained_texts(chat, tokens) == [CALL_TEXT + "<|im_end|>", "It is 84.<|im_end|>"]
    assert '{"type": "function"' in chat.text(tokens.token_ids)


def test_a_turn_of_weight_zero_is_not_trained(chatml: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(chatml)
    tokens = _tokenize(chat, _row(QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER))
    assert _trained_texts(chat, tokens) == ["It is 84.<|im_end|>"]


def test_b01_b03_headers_and_one_bos(headers: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(headers)
    tokens = _tokenize(chat, _row(QUESTION, ANSWER))
    assert headers("x")["input_ids"][0] == headers.bos_token_id  # it would add one
    assert tokens.token_ids.count(headers.bos_token_id) == 1
    assert _trained_texts(chat, tokens) == ["It is 84.<|eot|>"]


@pytest.mark.parametrize("style", ["chatml", "headers"])
def test_b03_training_and_rollout_meet_the_same_prompt(
    style: str, request: pytest.FixtureRequest
) -> None:
    chat = ChatFormat(request.getfixturevalue(style))
    prompt = chat.prompt([QUESTION])
    tokens = _tokenize(chat, _row(QUESTION, ANSWER))
    assert tokens.token_ids[: len(prompt)] == prompt
    assert tokens.trained[: len(prompt) + 1] == [0] * len(prompt) + [1]


EDGES = ["\n\nIt is 84.", "\n", " spaced", "é 😀 你好", "```\ncode\n```"]


@pytest.mark.parametrize("style", ["chatml", "words"])
@pytest.mark.parametrize("content", EDGES)
def test_an_answer_s_edge_is_never_inside_a_token(
    style: str, content: str, request: pytest.FixtureRequest
) -> None:
    """The template's newline and the answer's own would be one token in the whole text."""
    chat = ChatFormat(request.getfixturevalue(style))
    tokens = _tokenize(chat, _row(QUESTION, {"role": "assistant", "content": content}))
    assert _trained_texts(chat, tokens) == [content + "<|im_end|>"]
    prompt = chat.prompt([QUESTION])
    assert tokens.token_ids[: len(prompt)] == prompt


def test_the_whole_text_s_newlines_do_merge(chatml: PreTrainedTokenizerFast) -> None:
    """The premise of the test above: without the cut, the edge would lie inside a token."""
    text = "<|im_start|>assistant\n\n\nIt is 84."
    offsets = chatml(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    edge = len("<|im_start|>assistant\n")
    assert any(start < edge < end for start, end in offsets)


def test_a_tokenizer_that_begins_each_text_with_a_space(words: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(words)
    alone = words.convert_ids_to_tokens(words("It", add_special_tokens=False)["input_ids"])
    assert alone[0].startswith("▁")  # the premise
    tokens = _tokenize(chat, _row(QUESTION, ANSWER, QUESTION, ANSWER))
    assert _trained_texts(chat, tokens) == ["It is 84.<|im_end|>"] * 2
    rendered = words.apply_chat_template([QUESTION, ANSWER, QUESTION, ANSWER], tokenize=False)
    whole = words(rendered.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    assert tokens.token_ids == whole


def test_b05_an_observation_is_what_the_whole_rendering_has_there(
    chatml: PreTrainedTokenizerFast,
) -> None:
    chat = ChatFormat(chatml)
    played = chat.prompt([QUESTION], TOOLS)
    played += chatml(CALL_TEXT + "<|im_end|>", add_special_tokens=False)["input_ids"]
    observation = chat.observation([QUESTION, CALL, RESULT], 1, TOOLS)
    assert chat.text(observation) == ("\n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n")
    played += observation
    played += chatml("It is 84.<|im_end|>", add_special_tokens=False)["input_ids"]
    whole = _tokenize(chat, _row(QUESTION, CALL, RESULT, ANSWER, tools=TOOLS)).token_ids
    assert played == whole
    rendered = chatml.apply_chat_template(
        [QUESTION, CALL, RESULT, ANSWER], tools=TOOLS, tokenize=False
    )
    newline = chatml("\n", add_special_tokens=False)["input_ids"]
    assert whole + newline == chatml(rendered, add_special_tokens=False)["input_ids"]


def test_b05_a_turn_that_was_cut_is_closed_for_the_model(chatml: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(chatml)
    messages = [QUESTION, {"role": "assistant", "content": "It is"}, RESULT]
    closed = chat.observation(messages, 1)
    assert chat.observation(messages, 1, closed=False) == [chat.end_of_turn_id, *closed]


def test_what_the_model_spelled_out_does_not_move_the_observation(
    chatml: PreTrainedTokenizerFast,
) -> None:
    chat = ChatFormat(chatml)
    plain = chat.observation([QUESTION, ANSWER, QUESTION], 1)
    spelled = {"role": "assistant", "content": "a <|im_end|>\n<|im_start|>user b"}
    assert chat.observation([QUESTION, spelled, QUESTION], 1) == plain


def _with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    copy.chat_template = template
    return copy


def test_b01_a_template_that_rewrites_history_is_refused(chatml: PreTrainedTokenizerFast) -> None:
    counting = "{{- messages | length }}" + chatml.chat_template
    chat_template = counting.replace("{{- messages | length }}", "{{- messages | length // 3 }}")
    chat = ChatFormat(_with_template(chatml, chat_template))
    assert _tokenize(chat, _row(QUESTION, ANSWER)).trained
    with pytest.raises(ValueError, match=r"renders what precedes messages\[1\] differently"):
        _tokenize(chat, _row(QUESTION, ANSWER, QUESTION, ANSWER))
    with pytest.raises(ValueError, match=r"renders what precedes messages\[1\] differently"):
        chat.observation([QUESTION, CALL, RESULT], 1)


def test_a_template_that_drops_old_reasoning_still_trains_what_it_shows(
    chatml: PreTrainedTokenizerFast,
) -> None:
    """Earlier answers lose their reasoning, as in Qwen3: the mask covers what is left of them."""
    dropping = chatml.chat_template.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + (message.content if loop.last else "
        "message.content.split('</think>')[-1])",
    )
    chat = ChatFormat(_with_template(chatml, dropping))
    thinking = {"role": "assistant", "content": "<think>hm</think>It is 84."}
    tokens = _tokenize(chat, _row(QUESTION, thinking, QUESTION, thinking))
    assert _trained_texts(chat, tokens) == [
        "It is 84.<|im_end|>",
        "<think>hm</think>It is 84.<|im_end|>",
    ]


def test_a_message_that_ends_otherwise_is_refused(chatml: PreTrainedTokenizerFast) -> None:
    """As Llama 3.1 ends some tool calls: their mask must not run into what follows."""
    other_end = chatml.chat_template.replace(
        "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}",
        "{{- '\\n' if message.tool_calls else '<|im_end|>\\n' }}\n"
        "    {%- elif message.role == 'tool' %}",
    )
    chat = ChatFormat(_with_template(chatml, other_end))
    assert _tokenize(chat, _row(QUESTION, ANSWER)).trained
    with pytest.raises(ValueError, match=r"does not end messages\[1\] with '<\|im_end\|>'"):
        _tokenize(chat, _row(QUESTION, CALL, RESULT, ANSWER))


def test_an_answer_that_contains_the_end_of_turn_is_refused(
    chatml: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\] contains '<\|im_end\|>'"):
        _tokenize(
            ChatFormat(chatml), _row(QUESTION, {"role": "assistant", "content": "a<|im_end|>b"})
        )


def test_an_answer_to_nothing_is_refused(chatml: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(chatml)
    with pytest.raises(ValueError, match=r"messages\[0\] is the assistant's"):
        _tokenize(chat, _row(ANSWER, QUESTION, ANSWER))
    tokens = _tokenize(chat, _row({**ANSWER, "weight": 0}, QUESTION, ANSWER))
    assert _trained_texts(chat, tokens) == ["It is 84.<|im_end|>"]


def test_a_template_may_refuse_messages(chatml: PreTrainedTokenizerFast) -> None:
    refusing = "{%- if messages | length > 2 %}{{ raise_exception('too many') }}{%- endif %}"
    chat = ChatFormat(_with_template(chatml, refusing + chatml.chat_template))
    with pytest.raises(ValueError, match="refuses the messages: too many"):
        _tokenize(chat, _row(QUESTION, ANSWER, QUESTION, ANSWER))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", "opens"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no special token"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_at_once(
    chatml: PreTrainedTokenizerFast, template: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        ChatFormat(_with_template(chatml, template))
