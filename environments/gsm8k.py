"""`math/gsm8k`: word problems whose answer is a number, in GSM8K's own file format or in verl's.

A row of verl's files has the prompt as messages, and the answer as `reward_model.ground_truth`.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from environments.config import EnvironmentConfig, InvalidConfig, Problem
from environments.numeric_answers import parse_gold, verify
from environments.protocol import AssistantTurn, Env, Item, Message, StepResult
from environments.question_files import QuestionFileError, read_rows, resolve
from environments.registry import Entry


class Gsm8kConfig(EnvironmentConfig):
    """Settings of `math/gsm8k`."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """JSONL or Parquet file with `question` and `answer` (ending in `#### NUMBER`) in each row, or
    with verl's `prompt` and `reward_model.ground_truth`; under one of the service's data roots, and
    relative to it or absolute."""
    extraction: Literal["flexible", "strict"] = "flexible"
    r"""`strict`: the answer must follow `####`. `flexible`: the last of `####`, `\boxed{}` and "the
    answer is", else the last number."""
    instruction: Annotated[str, StringConstraints(max_length=10_000)] = ""
    """Put below every question, such as how to write the answer."""


class Gsm8kType:
    """The registry's entry for `math/gsm8k`."""

    id = "math/gsm8k"
    version = 1
    summary = "Word problems from a file in GSM8K's format; the number in the answer must be right."
    config_model: type[BaseModel] = Gsm8kConfig
    max_turns = 1
    reward_range = (0.0, 1.0)
    tools: Sequence[Mapping[str, Any]] = ()

    def items(self, config: BaseModel, *, seed: int, count: int) -> Sequence[Item]:
        """Rows in an order that the seed decides; at most as many as the file has.

        Raises:
            InvalidConfig: the file cannot be used, with the line that is at fault.
        """
        rows = _questions(_checked(config).path)
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        return [rows[index] for index in order[:count]]

    def key(self, item: Item) -> str:
        """The question's text."""
        return str(item["question"])

    def make(self, config: BaseModel, *, max_turns: int | None = None) -> Env:  # noqa: ARG002
        """A fresh episode; it always ends with its first turn."""
        return Gsm8kEnv(_checked(config))


class Gsm8kEnv:
    """One question and one answer."""

    def __init__(self, config: Gsm8kConfig) -> None:
        self._config = config
        self._gold = ""

    async def reset(self, *, seed: int, item: Item) -> tuple[list[Message], Mapping[str, Any]]:  # noqa: ARG002
        """The question as a user's message, behind those that its row begins with."""
        self._gold = item["answer"]
        parts = [item["question"], self._config.instruction]
        asked = {"role": "user", "content": "\n\n".join(part for part in parts if part)}
        return [*item.get("before", ()), asked], {}

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Scores the turn; None, with a reason, where the gold answer is no number."""
        verdict = verify(turn.text, self._gold, extraction=self._config.extraction)
        info: dict[str, Any] = {
            "reward_components": {} if verdict.reward is None else {"answer": verdict.reward},
            "metrics": {"answer_found": float(verdict.found)},
        }
        if verdict.reason:
            info["reason"] = verdict.reason
        return StepResult(
            messages=[], reward=verdict.reward, terminated=True, truncated=False, info=info
        )

    async def close(self) -> None:
        """Nothing is held."""


def _questions(path: str) -> list[dict[str, Any]]:
    """The file's rows, each checked: a gold answer that is no number is refused here."""
    try:
        rows = read_rows(resolve(path))
        return [_question(row, position) for position, row in enumerate(rows, start=1)]
    except QuestionFileError as error:
        raise InvalidConfig([Problem(("path",), str(error))]) from error


def _question(row: Mapping[str, Any], position: int) -> dict[str, Any]:
    names = ("question", "answer")
    verl = "reward_model" in row
    item = _of_verl(row, position) if verl else {name: row.get(name) for name in names}
    question, answer = item.get("question"), item.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
        raise QuestionFileError(f"row {position} needs texts `question` and `answer`")
    if parse_gold(answer) is None:
        raise QuestionFileError(f"row {position}: the answer must end in `#### NUMBER`")
    kept = {"question": question, "answer": answer}
    return {**kept, "before": item["before"]} if item.get("before") else kept


def _of_verl(row: Mapping[str, Any], position: int) -> dict[str, Any]:
    """A row of verl's in our own names; `before` are messages that precede the question."""
    reward, prompt = row["reward_model"], row.get("prompt")
    gold = reward.get("ground_truth") if isinstance(reward, dict) else None
    if not isinstance(gold, str | int | float):
        raise QuestionFileError(f"row {position} needs `reward_model.ground_truth`")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise QuestionFileError(f"row {position}: `prompt` must be a list of messages, or a text")
    if not messages or messages[-1]["role"] != "user":
        raise QuestionFileError(f"row {position}: `prompt` must end with the user's message")
    before = [{"role": m["role"], "content": m["content"]} for m in messages[:-1]]
    return {"question": messages[-1]["content"], "answer": f"#### {gold}", "before": before}


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def _checked(config: BaseModel) -> Gsm8kConfig:
    if not isinstance(config, Gsm8kConfig):
        raise TypeError(f"expected Gsm8kConfig, not {type(config).__name__}")
    return config


environments: Sequence[Entry] = (Entry(id=Gsm8kType.id, version=Gsm8kType.version, load=Gsm8kType),)
