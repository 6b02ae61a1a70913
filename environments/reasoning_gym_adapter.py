"""`reasoning_gym/*`: reasoning-gym's datasets, each an environment of one turn.

The package is imported when the first of them is loaded, for the settings alone. Questions are
drawn, and answers scored by the dataset's own verifier, in isolated processes: some datasets draw
other questions in every process unless its hash seed is fixed, some scorers can be made to hang.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from environments.isolation import CallTimeout, IsolationError, isolated
from environments.protocol import AssistantTurn, Env, EnvironmentType, Item, Message, StepResult
from environments.reasoning_gym_config import DatasetConfig, config_model
from environments.reasoning_gym_datasets import NAMES, may_be_scored
from environments.registry import Entry

VERSION = 1
MAX_ANSWER_CHARACTERS = 100_000
_SCORING = "environments.reasoning_gym_scoring"
_ITEMS_PER_CALL = 500
_DRAW_SECONDS = 5.0
_FIRST_ITEM_SECONDS = 30.0
"""For making the dataset, which reads a file in some, and one item: the slowest take 3 s."""
_ANSWER_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)


class ReasoningGymType:
    """The registry's entry for one dataset."""

    version = VERSION
    max_turns = 1
    reward_range = (0.0, 1.0)
    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, dataset: str) -> None:
        """Imports reasoning-gym.

        Raises:
            ImportError: it is not installed.
        """
        from reasoning_gym.factory import DATASETS

        self.id = f"reasoning_gym/{dataset}"
        self.summary = f"Questions of reasoning-gym's {dataset}, scored by its own verifier."
        self.config_model: type[BaseModel] = config_model(dataset, DATASETS[dataset][1])
        self._dataset = dataset

    def items(self, config: BaseModel, *, seed: int, count: int) -> Sequence[Item]:
        """See `EnvironmentType.items`.

        Raises:
            ValueError: the dataset cannot draw a question with these settings.
        """
        items: list[Item] = []
        while len(items) < count:
            request = {
                "dataset": self._dataset,
                "config": _checked(config).model_dump_json(),
                "seed": spread_seed(seed),
                "first": len(items),
                "count": min(_ITEMS_PER_CALL, count - len(items)),
                "seconds": _DRAW_SECONDS,
            }
            timeout = _DRAW_SECONDS + _FIRST_ITEM_SECONDS
            try:
                items += isolated(_SCORING).call("draw", request, timeout_seconds=timeout)
            except IsolationError as error:
                message = f"{self.id} cannot draw question {len(items)} or a later one: {error}"
                raise ValueError(message) from error
        return items

    def key(self, item: Item) -> str:
        """The question's text."""
        return str(item["question"])

    def make(self, config: BaseModel, *, max_turns: int | None = None) -> Env:  # noqa: ARG002
        """A fresh episode; it always ends with its first turn."""
        return ReasoningGymEnv(self._dataset, _checked(config))


class ReasoningGymEnv:
    """One question and one answer."""

    def __init__(self, dataset: str, config: DatasetConfig) -> None:
        self._dataset = dataset
        self._config = config
        self._item: Item = {}

    async def reset(self, *, seed: int, item: Item) -> tuple[list[Message], Mapping[str, Any]]:  # noqa: ARG002
        """The question as a user's message."""
        self._item = item
        parts = [item["question"], self._config.instruction]
        content = "\n\n".join(part for part in parts if part)
        return [{"role": "user", "content": content}], {}

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Scores the turn; None, with a reason, where the scorer fails or runs out of time."""
        answer = extract_answer(turn.text, self._config.answer_format)
        info: dict[str, Any] = {"metrics": {"answer_found": float(answer is not None)}}
        reward: float | None = 0.0
        if answer and len(answer) <= MAX_ANSWER_CHARACTERS:
            try:
                reward = await self._score(answer)
            except IsolationError as error:
                reward = None
                kind = "timeout" if isinstance(error, CallTimeout) else "scorer_failed"
                info["reason"] = f"{kind}: {error}"
        info["reward_components"] = {} if reward is None else {"answer": reward}
        return StepResult(messages=[], reward=reward, terminated=True, truncated=False, info=info)

    async def close(self) -> None:
        """Nothing is held."""

    async def _score(self, answer: str) -> float:
        if not may_be_scored(self._dataset, answer):
            return 0.0
        request = {
            "dataset": self._dataset,
            "config": self._config.model_dump_json(),
            "item": dict(self._item),
            "answer": answer,
        }
        timeout = self._config.scoring_timeout_seconds
        score = await isolated(_SCORING).call_async("score", request, timeout_seconds=timeout)
        return float(score)


def extract_answer(text: str, answer_format: str) -> str | None:
    """The part of a turn that is the answer, without white space around; None where it is missing.

    Args:
        text: the whole turn.
        answer_format: see `DatasetConfig.answer_format`.
    """
    if answer_format == "answer_tags":
        tagged = _ANSWER_TAGS.findall(text)
        return tagged[-1].strip() if tagged else None
    stripped = text.strip()
    if answer_format == "last_line":
        stripped = stripped.rpartition("\n")[2].strip()
    return stripped or None


def spread_seed(seed: int) -> int:
    """A seed below 2^31, such that neighbouring ones lie far apart.

    Item i of these datasets comes from `seed + i`, so with seeds 1 and 2 all questions but one
    would be the same. Steps of the golden ratio keep any few seeds apart (Knuth, The Art of
    Computer Programming, volume 3, section 6.4: Fibonacci hashing); the map is one to one.
    """
    return seed * 1_327_217_885 % 2**31


def _checked(config: BaseModel) -> DatasetConfig:
    if not isinstance(config, DatasetConfig):
        raise TypeError(f"expected a dataset's config, not {type(config).__name__}")
    return config


def _loader(dataset: str) -> Callable[[], EnvironmentType]:
    return partial(ReasoningGymType, dataset)


environments: Sequence[Entry] = tuple(
    Entry(id=f"reasoning_gym/{name}", version=VERSION, load=_loader(name)) for name in NAMES
)
