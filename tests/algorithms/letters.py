"""A small environment with everything that can happen in one: several turns, faults, no score."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from environments.protocol import AssistantTurn, Env, Item, Message, StepResult


class LettersConfig(BaseModel):
    size: int | None = None
    """How many questions there are; None for no end."""
    different: int = 1000
    """How many different ones come up, where there is no end."""


class Letters:
    """The reward is the share of the letters written that are the one asked for."""

    id = "test/letters"
    version = 1
    summary = "Write one letter"
    config_model: type[BaseModel] = LettersConfig
    max_turns = 1
    reward_range = (0.0, 1.0)
    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self) -> None:
        self.opened: list[LettersEnv] = []

    def items(self, config: BaseModel, *, seed: int, count: int) -> Sequence[Item]:
        assert isinstance(config, LettersConfig)
        draw = random.Random(seed)
        if config.size is not None:
            numbers = draw.sample(range(config.size), k=config.size)[:count]
        else:
            numbers = [draw.randrange(config.different) for _ in range(count)]
        return [{"letter": "a", "number": number} for number in numbers]

    def key(self, item: Item) -> str:
        return str(item["number"])

    def make(self, config: BaseModel, *, max_turns: int | None = None) -> Env:  # noqa: ARG002
        self.opened.append(LettersEnv(max_turns or self.max_turns))
        return self.opened[-1]


class LettersEnv:
    """`item["fault"]` says what goes wrong, `item["rewards"]` what each turn is worth."""

    def __init__(self, max_turns: int) -> None:
        self.turns: list[AssistantTurn] = []
        self.closed = 0
        self.seed = -1
        self._max_turns = max_turns

    async def reset(self, *, seed: int, item: Item) -> tuple[list[Message], Mapping[str, Any]]:
        if item.get("fault") == "reset":
            raise LookupError("no such question")
        self.seed, self._item = seed, item
        return [{"role": "user", "content": item.get("prompt", item["letter"])}], {}

    async def step(self, turn: AssistantTurn) -> StepResult:
        self.turns.append(turn)
        fault = self._item.get("fault")
        if fault == "step":
            raise ZeroDivisionError("bad environment")
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "cancel":
            raise asyncio.CancelledError
        rewards = self._item.get("rewards")
        done = len(self.turns) == len(rewards or [0])
        letters = [c for c in turn.text if c.isalpha()]
        share = sum(c == self._item["letter"] for c in letters) / max(len(letters), 1)
        return StepResult(
            messages=[] if done or fault == "silent" else [{"role": "user", "content": "more"}],
            reward=share if rewards is None else rewards[len(self.turns) - 1],
            terminated=done,
            truncated=False,
            info={"metrics": {"letters": len(letters)}},
        )

    async def close(self) -> None:
        self.closed += 1
        if self._item_fault() == "close":
            raise OSError("cannot close")

    def _item_fault(self) -> str | None:
        return getattr(self, "_item", {}).get("fault")
