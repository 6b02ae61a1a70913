"""Each format that users have, told apart by its fields, and what it says."""

from typing import Any

import pytest

from service.spec.rows import (
    FORMATS,
    Conversation,
    Labelled,
    PlainText,
    Preference,
    RowFault,
    VerifiablePrompt,
    check_format,
    format_of,
    kind_of_row,
    parse_row,
)

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}
OTHER = {"role": "assistant", "content": "no"}
HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "ho"}
ALPACA = {"instruction": "Add.", "input": "1 and 2"}

EXAMPLES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ANSWER]},
    "conversations": {"conversations": [HUMAN, GPT]},
    "instruction output": {**ALPACA, "output": "ho"},
    "prompt completion": {"prompt": "hi", "completion": "ho"},
    "question answer": {"question": "hi", "answer": "ho"},
    "input preferred_output non_preferred_output": {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [ANSWER],
        "non_preferred_output": [OTHER],
    },
    "chosen rejected": {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    "prompt chosen rejected": {"prompt": "hi", "chosen": "ho", "rejected": "no"},
    "messages chosen rejected": {"messages": [USER], "chosen": ANSWER, "rejected": OTHER},
    "conversations chosen rejected": {
        "conversations": [HUMAN],
        "chosen": GPT,
        "rejected": {"from": "gpt", "value": "no"},
    },
    "instruction chosen rejected": {**ALPACA, "chosen": "ho", "rejected": "no"},
    "messages label": {"messages": [USER, ANSWER], "label": True},
    "conversations label": {"conversations": [HUMAN, GPT], "kto_tag": False},
    "instruction output label": {**ALPACA, "output": "ho", "kto_tag": True},
    "prompt completion label": {"prompt": "hi", "completion": "ho", "label": False},
    "data_source prompt reward_model": {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "reward_model": {"style": "rule", "ground_truth": "72"},
    },
}


def _texts(row: Any) -> list[Any]:
    if isinstance(row, Preference):
        return [row.chosen, row.rejected]
    return [row.answer] if isinstance(row, Labelled) else [row]


def _answer(text: Any) -> Any:
    return text.answer if isinstance(text, PlainText) else text.messages[-1]["content"]


def test_there_is_an_example_of_each_format() -> None:
    assert [" ".join(one.fields) for one in FORMATS] == list(EXAMPLES)


@pytest.mark.parametrize("fields", EXAMPLES)
def test_a_format_is_known_by_its_fields_whatever_stands_beside_them(fields: str) -> None:
    row = EXAMPLES[fields] | {"id": 7, "source": "web", "score": None}
    found = format_of(row)
    assert " ".join(found.fields) == fields
    parsed = parse_row(row)
    assert kind_of_row(parsed) == found.kind
    for text in [] if isinstance(parsed, VerifiablePrompt) else _texts(parsed):
        if isinstance(text, PlainText):
            assert (text.prompt, text.answer in ("ho", "no")) == ("hi", True)
        else:
            question = "Add.\n1 and 2" if "instruction" in row else "hi"
            assert text.messages[0] == {"role": "user", "content": question}
            assert text.messages[1]["content"] in ("ho", "no")
            assert text.trained == [False, True]
    if isinstance(parsed, Preference):
        assert [_answer(text) for text in _texts(parsed)] == ["ho", "no"]
    if isinstance(parsed, Labelled):
        assert parsed.desirable == row.get("kto_tag", row.get("label"))


@pytest.mark.parametrize("fields", EXAMPLES)
def test_only_rows_of_the_algorithm_s_kind_are_taken(fields: str) -> None:
    found = format_of(EXAMPLES[fields])
    for wanted in ("conversation", "preference", "label"):
        if wanted == found.kind:
            check_format(found, wanted)  # type: ignore[arg-type]
        else:
            with pytest.raises(RowFault, match="but the algorithm trains on rows"):
                check_format(found, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, r"it has none.*use one of: `messages`; `conversations`; .*`reward_model`"),
        ({"text": "a"}, r"\(`text`\); use one of"),
        ({"prompt": "a"}, r"\(`prompt`\); for prompt and completion it lacks `completion`"),
        ({"prompt": "a", "chosen": "b"}, r"it lacks `rejected`"),
        ({"messages": None, "text": "a"}, r"\(`text`\)"),
        (
            {"messages": [USER, ANSWER], **ALPACA, "output": "x"},
            r"OpenAI chat \(`messages`\) or Alpaca \(`instruction`, `output`\)",
        ),
        ({"messages": [USER, ANSWER], "conversations": [HUMAN, GPT]}, "OpenAI chat .* or ShareGPT"),
        (
            {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"},
            r"prompt and completion .* or chosen and rejected",
        ),
    ],
)
def test_where_it_is_not_sure_it_says_what_it_saw_and_what_is_possible(
    row: dict[str, Any], says: str
) -> None:
    with pytest.raises(RowFault, match=says):
        parse_row(row)


@pytest.mark.parametrize("label", ["good", 1, 0, [True]])
def test_a_label_that_is_not_true_or_false_is_never_guessed(label: Any) -> None:
    with pytest.raises(RowFault, match="not true or false"):
        parse_row({"messages": [USER, ANSWER], "label": label})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "text"}, "`messages` is a string, not a list"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["hi"]}, r"`messages\[0\]` is a string, not an object"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, r"`messages\[1\].role` is 'bot'"),
        ({"messages": [{"role": "user", "content": None}]}, r"`messages\[0\].content` is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "list of text parts"),
        ({"messages": [USER]}, "nothing to train on"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "nothing to train on"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"weight` is a number; use 0 or 1"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "`tools` is no list of objects"),
        ({"messages": [USER, ANSWER], "tools": "[1"}, "`tools` is a string that is no JSON"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "in a message of the role user"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}]}, "use `tool_calls`"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "`images`, and only text"),
        ({"messages": [{**USER, "reasoning": "x"}, ANSWER]}, "that no assistant wrote"),
        ({"messages": [USER, {**ANSWER, "reasoning": "a", "thinking": "b"}]}, "different"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, r"conversations\[0\].from` is 'bot'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, r"\[0\].from` is a list"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "{"}]}, "is no JSON"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "{}"}]}, "no function"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "value` is a number"),
        ({**ALPACA, "output": 3}, "`output` is a number"),
        ({**ALPACA, "output": "x", "history": [["a"]]}, r"`history\[0\]` is no pair"),
        ({"prompt": 3, "completion": "x"}, "`prompt` is a number"),
        ({"prompt": "x", "completion": 3}, "`completion` is a number"),
        ({"prompt": "x", "completion": [USER]}, "is not the `prompt`|begins with a message"),
        ({"chosen": "a", "rejected": "b"}, "`chosen` is a string and there is no prompt"),
        ({"chosen": [USER, ANSWER], "rejected": [{**USER, "content": "x"}, OTHER]}, "message 0"),
        ({"chosen": [ANSWER], "rejected": [OTHER]}, "no prompt in common"),
        ({"prompt": "a", "chosen": "b", "rejected": [OTHER]}, "the other is not"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "`margin` is a string"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400}, "out of range"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [OTHER]}, "does not repeat the prompt"),
        ({"messages": [USER, ANSWER, USER], "label": True}, "last message is of the role user"),
        ({"messages": [USER, ANSWER], "label": True, "kto_tag": True}, "both `label` and"),
        (
            {"input": [USER], "preferred_output": [ANSWER], "non_preferred_output": [OTHER]},
            "`input` is a list",
        ),
        (
            {"data_source": "x", "prompt": [USER], "reward_model": {"style": "rule"}},
            "`reward_model.ground_truth` is missing",
        ),
    ],
)
def test_b11_a_bad_row_is_refused_with_the_place(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RowFault, match=says):
        parse_row(row)


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("arguments", ['{"x": "1 + 2"}', {"x": "1 + 2"}])
def test_a_tool_call_s_arguments_become_an_object_and_its_content_text(arguments: Any) -> None:
    row = parse_row({"messages": [USER, _call(arguments)]})
    assert isinstance(row, Conversation)
    assert row.messages[1]["content"] == ""
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": "1 + 2"}


@pytest.mark.parametrize("arguments", ["{", "[1]", [1], 3])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    with pytest.raises(RowFault, match=r"tool_calls\[0\].function.arguments` is"):
        parse_row({"messages": [USER, _call(arguments)]})


def test_text_parts_are_joined_and_weight_zero_is_context() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = parse_row(
        {"messages": [{"role": "user", "content": parts}, {**ANSWER, "weight": 0}, USER, ANSWER]}
    )
    assert isinstance(row, Conversation)
    assert row.messages[0]["content"] == "ab"
    assert row.trained == [False, False, False, True]
    assert all("weight" not in message for message in row.messages)


def test_alpaca_s_history_and_system_are_turns() -> None:
    fields = {"output": "3", "system": "Be brief.", "history": [["q", "a"]]}
    row = parse_row({**ALPACA, **fields})
    assert isinstance(row, Conversation)
    assert [(m["role"], m["content"]) for m in row.messages] == [
        ("system", "Be brief."),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "Add.\n1 and 2"),
        ("assistant", "3"),
    ]
    pair = parse_row({**ALPACA, **fields, "output": None, "chosen": "x", "rejected": "y"})
    assert isinstance(pair, Preference)
    assert isinstance(pair.chosen, Conversation)
    assert pair.chosen.trained == [False, False, False, False, True]  # only the answers of a pair


def test_sharegpt_s_calls_observations_tools_and_system() -> None:
    row = parse_row(
        {
            "system": "Be right.",
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "2"},
                GPT,
            ],
            "tools": '[{"name": "f", "parameters": {}}]',
        }
    )
    assert isinstance(row, Conversation)
    assert [m["role"] for m in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert row.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert row.trained == [False, False, True, False, True]


def test_a_pair_s_prompt_may_stand_in_both_conversations() -> None:
    before = [USER, {"role": "assistant", "content": "so?"}, USER]
    tail = [ANSWER, USER, {"role": "assistant", "content": "more"}]
    row = parse_row({"chosen": [*before, *tail], "rejected": [*before, OTHER]})
    assert isinstance(row, Preference)
    assert isinstance(row.chosen, Conversation)
    assert isinstance(row.rejected, Conversation)
    assert row.chosen.trained == [False] * 3 + [True, False, True]
    assert row.rejected.trained == [False] * 3 + [True]


def test_two_equal_answers_have_the_same_prompt() -> None:
    row = parse_row({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]})
    assert isinstance(row, Preference)
    assert isinstance(row.chosen, Conversation)
    assert row.chosen.trained == [False, True]


def test_ultrafeedback_s_rows_have_everything_twice() -> None:
    chosen, rejected = [USER, ANSWER], [USER, OTHER]
    row = parse_row(
        {"prompt": "hi", "messages": chosen, "chosen": chosen, "rejected": rejected, "margin": 2}
    )
    assert isinstance(row, Preference)
    assert isinstance(row.chosen, Conversation)
    assert (row.chosen.messages, row.chosen.trained) == ([USER, ANSWER], [False, True])
    assert row.margin == 2.0


def test_a_label_speaks_of_the_last_answer_alone() -> None:
    row = parse_row({"messages": [USER, ANSWER, USER, OTHER], "label": False})
    assert isinstance(row, Labelled)
    assert isinstance(row.answer, Conversation)
    assert row.answer.trained == [False, False, False, True]


def test_reasoning_has_one_name() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        row = parse_row({"messages": [USER, {**ANSWER, name: "hm"}]})
        assert isinstance(row, Conversation)
        assert row.messages[1] == {**ANSWER, "reasoning_content": "hm"}


def test_verl_s_row_keeps_what_verifies_an_answer() -> None:
    row = parse_row(EXAMPLES["data_source prompt reward_model"])
    assert row == VerifiablePrompt(messages=[USER], ground_truth="72", data_source="openai/gsm8k")
