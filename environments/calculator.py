"""`tools/calculator`: questions and verifier of another environment, with a calculator to hand.

In each turn the policy either calls the tool and reads what it says in the next, or answers and is
scored. Whatever it writes in a call, the worst that comes back is a tool message with an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from environments import registry
from environments.config import EnvironmentConfig, InvalidConfig, Problem, Questions, parse_config
from environments.expressions import MAX_CHARACTERS, ExpressionError, calculate
from environments.protocol import (
    AssistantTurn,
    Env,
    EnvironmentType,
    Item,
    Message,
    StepResult,
    ToolCall,
)
from environments.registry import Entry, UnknownEnvironment, UnknownVersion

MAX_CALLS_PER_TURN = 8
_KEY = "question_key"

CALCULATOR_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "maxLength": MAX_CHARACTERS,
                    "description": "Numbers, + - * / ** and brackets, such as (58 + 26) * 2.",
                }
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}


class CalculatorConfig(EnvironmentConfig):
    """Settings of `tools/calculator`."""

    questions: Questions
    """Where the questions come from, and who scores the answers."""


class CalculatorType:
    """The registry's entry for `tools/calculator`."""

    id = "tools/calculator"
    version = 1
    summary = "Questions of another environment; the policy may call a calculator first."
    config_model: type[BaseModel] = CalculatorConfig
    max_turns = 2
    # Every environment here scores from 0 to 1, and a calculator's turns score 0.
    reward_range = (0.0, 1.0)
    tools: Sequence[Mapping[str, Any]] = (CALCULATOR_TOOL,)

    def items(self, config: BaseModel, *, seed: int, count: int) -> Sequence[Item]:
        """The inner environment's items, each with its key there beside it."""
        inner, inner_config = _inner(config)
        try:
            items = inner.items(inner_config, seed=seed, count=count)
        except InvalidConfig as error:
            raise error.under("questions", "config") from error
        return [{**item, _KEY: inner.key(item)} for item in items]

    def key(self, item: Item) -> str:
        """The key that the inner environment gave."""
        return str(item[_KEY])

    def make(self, config: BaseModel, *, max_turns: int | None = None) -> Env:
        """See `EnvironmentType.make`.

        Raises:
            InvalidConfig: the questions' environment is unknown, unfit or wrongly configured.
        """
        inner, inner_config = _inner(config)
        return CalculatorEnv(inner.make(inner_config), max_turns=max_turns or self.max_turns)


class CalculatorEnv:
    """One episode: tool calls are answered, anything else is taken as the answer and scored."""

    def __init__(self, questions: Env, *, max_turns: int) -> None:
        self._questions = questions
        self._turns_left = max_turns

    async def reset(self, *, seed: int, item: Item) -> tuple[list[Message], Mapping[str, Any]]:
        """The question, as its own environment puts it."""
        return await self._questions.reset(seed=seed, item=item)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Answers the turn's calls, or scores its text where it made none."""
        self._turns_left -= 1
        if not turn.tool_calls and not turn.tool_call_errors:
            return _with_counts(await self._questions.step(turn), calls=0, errors=0)
        if self._turns_left <= 0:
            # Nobody would read the result: the episode ends without an answer.
            return StepResult(
                messages=[],
                reward=0.0,
                terminated=False,
                truncated=True,
                info={
                    "reward_components": {"answer": 0.0},
                    "metrics": _counts(len(turn.tool_calls), len(turn.tool_call_errors)),
                },
            )
        messages, errors = _answer_calls(turn)
        return StepResult(
            messages=messages,
            reward=0.0,
            terminated=False,
            truncated=False,
            info={"reward_components": {}, "metrics": _counts(len(turn.tool_calls), errors)},
        )

    async def close(self) -> None:
        """Closes the questions' environment."""
        await self._questions.close()


def run_calculator(name: str, arguments: Mapping[str, Any]) -> str:
    """What the tool says to a call that parsed.

    Raises:
        ExpressionError: another tool, other arguments, or an expression without a value.
    """
    if name != "calculator":
        raise ExpressionError(f"there is no tool called {name[:64]!r}; there is calculator")
    if set(arguments) != {"expression"}:
        raise ExpressionError("calculator takes exactly one argument, expression")
    expression = arguments["expression"]
    if not isinstance(expression, str):
        raise ExpressionError("expression must be a string")
    return calculate(expression)


def _answer_calls(turn: AssistantTurn) -> tuple[list[Message], int]:
    """A tool message for each call and for each malformed one, and how many were in error."""
    answered = [(call.id, *_answer(call)) for call in turn.tool_calls[:MAX_CALLS_PER_TURN]]
    malformed = enumerate(turn.tool_call_errors[:MAX_CALLS_PER_TURN])
    answered += [(f"malformed_{position}", f"error: {text}", True) for position, text in malformed]
    errors = sum(wrong for _, _, wrong in answered)
    for unread in (turn.tool_calls, turn.tool_call_errors):
        errors += max(0, len(unread) - MAX_CALLS_PER_TURN)
    if len(turn.tool_calls) > MAX_CALLS_PER_TURN:
        first = turn.tool_calls[MAX_CALLS_PER_TURN].id
        answered.append((first, f"error: more than {MAX_CALLS_PER_TURN} calls in one turn", True))
    messages = [{"role": "tool", "tool_call_id": id, "content": text} for id, text, _ in answered]
    return messages, errors


def _answer(call: ToolCall) -> tuple[str, bool]:
    """What the tool says to a call, and whether that is an error."""
    try:
        return run_calculator(call.name, call.arguments), False
    except ExpressionError as error:
        return f"error: {error}", True


def _counts(calls: int, errors: int) -> dict[str, float]:
    return {"tool_calls": float(calls), "tool_errors": float(errors)}


def _with_counts(result: StepResult, *, calls: int, errors: int) -> StepResult:
    metrics = {**result.info.get("metrics", {}), **_counts(calls, errors)}
    return StepResult(
        messages=result.messages,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        info={**result.info, "metrics": metrics},
    )


def _inner(config: BaseModel) -> tuple[EnvironmentType, BaseModel]:
    """The questions' environment and its checked config.

    Raises:
        InvalidConfig: with paths that begin at this environment's own config.
    """
    if not isinstance(config, CalculatorConfig):
        raise TypeError(f"expected CalculatorConfig, not {type(config).__name__}")
    questions = config.questions
    try:
        inner = registry.get(questions.id, questions.version)
    except UnknownVersion as error:
        raise InvalidConfig([Problem(("questions", "version"), str(error))]) from error
    except UnknownEnvironment as error:
        raise InvalidConfig([Problem(("questions", "id"), str(error))]) from error
    if inner.tools or inner.max_turns != 1:
        message = f"{inner.id} has tools or turns of its own; questions come from one-turn ones"
        raise InvalidConfig([Problem(("questions", "id"), message)])
    try:
        return inner, parse_config(inner.config_model, questions.config)
    except InvalidConfig as error:
        raise error.under("questions", "config") from error


environments: Sequence[Entry] = (
    Entry(id=CalculatorType.id, version=CalculatorType.version, load=CalculatorType),
)
