"""tools/calculator: two turns over another environment's questions, whatever the policy writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from environments.calculator import MAX_CALLS_PER_TURN, CalculatorConfig, CalculatorType
from environments.config import InvalidConfig, parse_config
from environments.protocol import AssistantTurn, Env, StepResult, ToolCall
from environments.tool_calls import parse

TYPE = CalculatorType()
ITEM = {"question": "What is 58 + 26?", "answer": "#### 84", "question_key": "What is 58 + 26?"}


@pytest.fixture
def config(tmp_path: Path) -> CalculatorConfig:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} + 26?", "answer": f"#### {n + 26}"} for n in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = {"id": "math/gsm8k", "config": {"path": str(file)}}
    return parse_config(CalculatorConfig, {"questions": questions})


async def begin(config: CalculatorConfig, max_turns: int | None = None) -> Env:
    env = TYPE.make(config, max_turns=max_turns)
    messages, _ = await env.reset(seed=1, item=ITEM)
    assert messages == [{"role": "user", "content": "What is 58 + 26?"}]
    return env


def written(text: str) -> AssistantTurn:
    """The turn that the runner makes of what the policy wrote."""
    turn = parse(text)
    return AssistantTurn(text=turn.content, tool_calls=turn.calls, tool_call_errors=turn.errors)


def calling(arguments: Mapping[str, Any], name: str = "calculator") -> AssistantTurn:
    return AssistantTurn(
        text="", tool_calls=[ToolCall(id="call_0", name=name, arguments=arguments)]
    )


@pytest.mark.asyncio
async def test_a_call_is_answered_and_the_next_turn_scored(config: CalculatorConfig) -> None:
    env = await begin(config)
    first = await env.step(
        written(
            '<tool_call>{"name": "calculator", "arguments": {"expression": "58 + 26"}}</tool_call>'
        )
    )
    assert first == StepResult(
        messages=[{"role": "tool", "tool_call_id": "call_0", "content": "84"}],
        reward=0.0,
        terminated=False,
        truncated=False,
        info={"reward_components": {}, "metrics": {"tool_calls": 1.0, "tool_errors": 0.0}},
    )
    second = await env.step(AssistantTurn(text="84"))
    assert (second.reward, second.terminated, second.truncated) == (1.0, True, False)
    assert second.info["reward_components"] == {"answer": 1.0}
    assert second.info["metrics"] == {"answer_found": 1.0, "tool_calls": 0.0, "tool_errors": 0.0}
    await env.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("text", "reward"), [("84", 1.0), ("85", 0.0), ("", 0.0)])
async def test_a_direct_answer_is_scored_at_once(
    config: CalculatorConfig, text: str, reward: float
) -> None:
    env = await begin(config)
    result = await env.step(AssistantTurn(text=text))
    assert (result.reward, result.terminated, result.messages) == (reward, True, [])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (calling({"expression": "1 / 0"}), "error: division by zero"),
        (calling({"expression": "58 +"}), "error: the expression ends where a number is missing"),
        (calling({"expression": "9**9**9**9"}), "error: the result is too large"),
        (calling({"expression": "1+" * 10_000 + "1"}), "longer than 512 characters"),
        (calling({"expression": "__import__('os')"}), "error: unexpected '_'"),
        (calling({"expression": 84}), "error: expression must be a string"),
        (calling({"expression": None}), "error: expression must be a string"),
        (calling({}), "error: calculator takes exactly one argument"),
        (calling({"expr": "1"}), "error: calculator takes exactly one argument"),
        (calling({"expression": "1", "x": 1}), "error: calculator takes exactly one argument"),
        (calling({"expression": "1"}, name="python"), "error: there is no tool called 'python'"),
        (calling({"expression": "1"}, name="x" * 10**6), "error: there is no tool called 'xxx"),
        (written("<tool_call>{bad"), "error: malformed tool call: not valid JSON"),
        (written('<tool_call>{"name": "calculator"}</tool_call>'), "error: malformed tool call"),
    ],
)
async def test_a_bad_call_is_told_and_the_episode_goes_on(
    config: CalculatorConfig, turn: AssistantTurn, message: str
) -> None:
    env = await begin(config)
    result = await env.step(turn)
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)
    assert [item["role"] for item in result.messages] == ["tool"]
    assert message in result.messages[0]["content"]
    assert len(result.messages[0]["content"]) < 300
    assert result.info["metrics"]["tool_errors"] == 1.0
    assert (await env.step(AssistantTurn(text="84"))).reward == 1.0


@pytest.mark.asyncio
async def test_several_calls_are_answered_one_by_one(config: CalculatorConfig) -> None:
    env = await begin(config)
    calls = [
        ToolCall(id="a", name="calculator", arguments={"expression": "1 + 1"}),
        ToolCall(id="b", name="calculator", arguments={"expression": "1 +"}),
    ]
    result = await env.step(AssistantTurn(text="", tool_calls=calls, tool_call_errors=["broken"]))
    assert [message["tool_call_id"] for message in result.messages] == ["a", "b", "malformed_0"]
    assert result.messages[0]["content"] == "2"
    assert result.info["metrics"] == {"tool_calls": 2.0, "tool_errors": 2.0}


@pytest.mark.asyncio
async def test_the_number_of_calls_in_a_turn_is_bounded(config: CalculatorConfig) -> None:
    env = await begin(config)
    call = ToolCall(id="a", name="calculator", arguments={"expression": "1"})
    result = await env.step(AssistantTurn(text="", tool_calls=[call] * 100))
    contents = [message["content"] for message in result.messages]
    assert contents[:MAX_CALLS_PER_TURN] == ["1"] * MAX_CALLS_PER_TURN
    assert len(contents) == MAX_CALLS_PER_TURN + 1
    assert "more than 8 calls" in contents[-1]
    assert result.info["metrics"] == {"tool_calls": 100.0, "tool_errors": 92.0}


@pytest.mark.asyncio
@pytest.mark.parametrize("max_turns", [None, 1, 4])
async def test_a_call_in_the_last_turn_ends_the_episode(
    config: CalculatorConfig, max_turns: int | None
) -> None:
    env = await begin(config, max_turns)
    for _ in range((max_turns or 2) - 1):
        result = await env.step(calling({"expression": "1"}))
        assert not result.truncated
    result = await env.step(calling({"expression": "58 + 26"}))
    assert (result.messages, result.reward) == ([], 0.0)
    assert (result.terminated, result.truncated) == (False, True)
    assert result.info["metrics"] == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_items_and_keys_are_the_inner_environments(config: CalculatorConfig) -> None:
    ten = TYPE.items(config, seed=1, count=10)
    assert TYPE.items(config, seed=1, count=20)[:10] == ten
    assert [TYPE.key(item) for item in ten] == [item["question"] for item in ten]


@pytest.mark.parametrize(
    ("questions", "loc"),
    [
        ({"id": "math/gsm9k"}, ("questions", "id")),
        ({"id": "math/gsm8k", "version": 99}, ("questions", "version")),
        ({"id": "math/gsm8k"}, ("questions", "config", "path")),
        ({"id": "math/gsm8k", "config": {"path": "x"}}, ("questions", "config", "path")),
        ({"id": "tools/calculator"}, ("questions", "id")),
    ],
)
def test_errors_of_the_inner_environment_have_their_path(
    questions: dict[str, Any], loc: tuple[str, ...]
) -> None:
    config = parse_config(CalculatorConfig, {"questions": questions})
    with pytest.raises(InvalidConfig) as raised:
        TYPE.items(config, seed=1, count=1)
    assert raised.value.problems[0].loc == loc


def test_the_tool_is_in_openais_format() -> None:
    assert TYPE.tools[0]["type"] == "function"
    assert TYPE.tools[0]["function"]["parameters"]["required"] == ["expression"]
    json.dumps(list(TYPE.tools))
