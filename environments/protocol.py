"""What an environment is: Gymnasium's 5-tuple over chat messages, async, several turns.

An environment is played by one episode at a time: `reset`, then `step` after each assistant turn,
then `close`. It sees text and tool calls; tokens are the runner's business (each turn carries
them for environments that care). An exception in any of the three fails that episode only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

type Message = dict[str, Any]
"""An OpenAI chat message: `role`, `content`, and `tool_calls` or `tool_call_id`."""

type Item = Mapping[str, Any]
"""One question, as JSON values. `environments.registry` says how items are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy wrote and that parsed."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """What the policy wrote in one turn.

    Attributes:
        text: decoded, without the end-of-turn token and without tool-call markup.
        tool_calls: the calls that parsed.
        tool_call_errors: one message for each call that did not parse.
        token_ids: as sampled, the end-of-turn token included.
        log_probs: of each token, as sampled.
        truncated: the turn was cut by a length bound, so no end-of-turn token came.
    """

    text: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_errors: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Gymnasium's 5-tuple, by name.

    Attributes:
        messages: new messages for the policy (tool results, a user's reply); empty at the end.
        reward: for this turn; None where it cannot be scored, which is not 0.
        terminated: the episode came to its own end.
        truncated: the episode was cut (turn limit).
        info: `reward_components` and `metrics` (numbers by name), and a `reason` where unscorable.
            Numbers are this turn's alone, as the reward is: an episode's are the sums over turns.
    """

    messages: Sequence[Message]
    reward: float | None
    terminated: bool
    truncated: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode's environment."""

    async def reset(self, *, seed: int, item: Item) -> tuple[list[Message], Mapping[str, Any]]:
        """The opening messages, and info (numbers by name, for metrics)."""
        ...

    async def step(self, turn: AssistantTurn) -> StepResult:
        """The environment's answer to one assistant turn."""
        ...

    async def close(self) -> None:
        """Frees what the episode held. Called once, whatever happened."""
        ...


class EnvironmentType(Protocol):
    """A registry entry: makes items and environments from a checked config."""

    id: str
    version: int
    summary: str
    config_model: type[BaseModel]
    """Checked at submit; strict, closed, every field described."""
    max_turns: int
    """Assistant turns of an episode, where the job does not say otherwise."""
    reward_range: tuple[float, float]
    tools: Sequence[Mapping[str, Any]]
    """Tools in OpenAI's function format; empty where there are none."""

    def items(self, config: BaseModel, *, seed: int, count: int) -> Sequence[Item]:
        """`count` questions, the same for the same arguments; fewer where the source has fewer.

        `items(seed=s, count=n)` is a prefix of `items(seed=s, count=m)` for n < m.
        """
        ...

    def key(self, item: Item) -> str:
        """What makes two items the same question; held-out items are told from others by it."""
        ...

    def make(self, config: BaseModel, *, max_turns: int | None = None) -> Env:
        """A fresh environment for one episode of at most `max_turns` turns (None: the type's)."""
        ...
