from typing import Any

import pytest

from algorithms.data.alpaca import alpaca_to_messages
from algorithms.data.rows import parse_conversation

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_a_tool_call_s_arguments_become_an_object_and_its_content_text() -> None:
    row = parse_conversation({"messages": [USER, _call('{"expression": "1 + 2"}')]})
    message = row.messages[1]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"expression": "1 + 2"}
    assert row.trained == [False, True]


def test_text_parts_are_joined_and_weight_zero_is_context() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = parse_conversation(
        {"messages": [{"role": "user", "content": parts}, {**ANSWER, "weight": 0}, USER, ANSWER]}
    )
    assert row.messages[0]["content"] == "ab"
    assert row.trained == [False, False, False, True]
    assert "weight" not in row.messages[1]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "`messages` must be a list"),
        ({"messages": "text"}, "`messages` must be a list"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object, not str"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, r"messages\[1\]\.role is 'bot'"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]\.content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "list of text parts"),
        ({"messages": [USER]}, "no assistant message to train on"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no assistant message to train on"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "`tools` must be a list of objects"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "only an assistant calls tools"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "x"}]}, "tool_calls must be a list"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, r"tool_calls\[0\] must be"),
        ({"messages": [USER, _call("{")]}, "arguments is no JSON"),
        ({"messages": [USER, _call("[1]")]}, "arguments must be an object"),
    ],
)
def test_a_bad_row_is_refused_with_the_place(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_conversation(row)


def test_alpaca_rows_become_conversations() -> None:
    row = {
        "instruction": "Add.",
        "input": "1 and 2",
        "output": "3",
        "system": "Be brief.",
        "history": [["q", "a"]],
    }
    roles = [(m["role"], m["content"]) for m in alpaca_to_messages(row)["messages"]]
    assert roles == [
        ("system", "Be brief."),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "Add.\n1 and 2"),
        ("assistant", "3"),
    ]
    with pytest.raises(ValueError, match="`output` must be a string"):
        alpaca_to_messages({"instruction": "Add."})
