"""Tool calls as a model under training writes them: well, badly, and maliciously."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.tool_calls import MAX_CALLS, MAX_DEPTH, parse


def call(name: object = "calculator", **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_call_and_the_text_around_it() -> None:
    turn = parse("Let me see. " + call(expression="58 + 26") + "\n")
    assert turn.content == "Let me see."
    assert [(item.name, item.arguments) for item in turn.calls] == [
        ("calculator", {"expression": "58 + 26"})
    ]
    assert turn.errors == []


def test_text_without_a_call_is_left_as_it_is() -> None:
    turn = parse("  84\n")
    assert (turn.content, turn.calls, turn.errors) == ("  84\n", [], [])


def test_several_calls_have_ids_of_their_own() -> None:
    turn = parse(call(a=1) + "\n" + call(a=2), id_prefix="turn3")
    assert [item.id for item in turn.calls] == ["turn3_0", "turn3_1"]
    assert [item.arguments["a"] for item in turn.calls] == [1, 2]


def test_arguments_may_be_a_string_that_holds_json() -> None:
    turn = parse('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1} "}</tool_call>')
    assert turn.calls[0].arguments == {"x": 1}


def test_a_closing_tag_inside_a_string_ends_nothing() -> None:
    turn = parse(call(text="</tool_call><tool_call>"))
    assert turn.calls[0].arguments == {"text": "</tool_call><tool_call>"}


def test_a_bad_call_does_not_hide_a_good_one() -> None:
    turn = parse("<tool_call>{bad}</tool_call> and " + call(a=1))
    assert len(turn.errors) == 1
    assert turn.calls[0].arguments == {"a": 1}
    assert turn.content == "and"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"name": "f", "arguments": {}', "not valid JSON"),
        ("{'name': 'f'}</tool_call>", "not valid JSON"),
        ("</tool_call>", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {}}', "no </tool_call>"),
        ('{"name": "f", "arguments": {}} {}</tool_call>', "no </tool_call>"),
        ('["f"]</tool_call>', "expected a JSON object"),
        ('{"arguments": {}}</tool_call>', '"name" must be a string'),
        ('{"name": 3, "arguments": {}}</tool_call>', '"name" must be a string'),
        ('{"name": "f"}</tool_call>', '"arguments" must be a JSON object'),
        ('{"name": "f", "arguments": [1]}</tool_call>', '"arguments" must be a JSON object'),
        ('{"name": "f", "arguments": "x"}</tool_call>', "not valid JSON"),
        ('{"name": "f", "arguments": "{} {}"}</tool_call>', "more than one JSON object"),
        ('{"name": "f", "arguments": {}, "more": 1}</tool_call>', "unknown key 'more'"),
        ('{"name": "f", "arguments": {"x": NaN}}</tool_call>', "out of range"),
        ('{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "out of range"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "out of range"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 100_000, "not valid JSON|too deeply"),
        (
            '{"name": "f", "arguments": {"x": '
            + "[" * MAX_DEPTH
            + "]" * MAX_DEPTH
            + "}}</tool_call>",
            "too deeply",
        ),
        ('{"name": "f", "arguments": {"x": "' + "a" * 70_000 + '"}}</tool_call>', "not valid JSON"),
    ],
)
def test_a_malformed_call_is_one_error(body: str, message: str) -> None:
    turn = parse("<tool_call>" + body)
    assert turn.calls == []
    assert len(turn.errors) == 1
    assert any(part in turn.errors[0] for part in message.split("|"))


def test_calls_without_end_are_cut_off_and_cost_no_time() -> None:
    started = time.process_time()
    turn = parse('<tool_call>{"a": "' * 60_000)
    assert len(turn.errors) == MAX_CALLS + 1
    assert "more than" in turn.errors[-1]
    assert time.process_time() - started < 2.0


_PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"x": 1}}',
        '"arguments": ',
        '"name": "f"',
        "{",
        "}",
        "[",
        '"',
        "\\u",
        "\\ud800",
        "1e999",
        "NaN",
        "9" * 5000,
        "[" * 2000,
    ]
)


@given(st.lists(st.one_of(_PIECES, st.text(max_size=8)), max_size=12).map("".join))
def test_no_text_raises(text: str) -> None:
    turn = parse(text)
    json.dumps([dict(item.arguments) for item in turn.calls], allow_nan=False).encode()
    if "<tool_call>" not in text:
        assert turn.content == text


_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
    )
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner),
    max_leaves=10,
)


@given(
    st.text("abc_", min_size=1),
    st.dictionaries(st.text("xyz", max_size=3), _JSON, max_size=3),
    st.text("words ", max_size=10),
)
def test_what_is_written_is_read(name: str, arguments: dict[str, Any], around: str) -> None:
    written = json.dumps({"name": name, "arguments": arguments})
    turn = parse(f"{around}<tool_call>\n{written}\n</tool_call>{around}")
    assert turn.errors == []
    assert (turn.calls[0].name, turn.calls[0].arguments) == (name, arguments)
    assert turn.content == (around + around).strip()
