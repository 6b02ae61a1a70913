"""One episode as it was played, token by token.

An episode's sequence is its segments one after the other: a prompt, then what the policy wrote,
then what the environment answered, and so on. Nothing is tokenized twice: a policy segment holds
the very ids that were sampled, with the log-prob each was drawn with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from environments.protocol import Item, Message

Origin = Literal["prompt", "policy", "observation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens of one origin. All but the tokens belongs to the policy's only."""

    origin: Origin
    token_ids: Sequence[int]
    log_probs: Sequence[float] = ()
    weight_version: int | None = None
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(slots=True, kw_only=True)
class Episode:
    """Grows turn by turn while it is played.

    Attributes:
        item: the question.
        messages: the conversation so far, for templates and for people.
        segments: all tokens, in order.
        rewards: of each turn; None where a turn could not be scored.
        tool_calls: calls that parsed.
        malformed_tool_calls: calls that did not.
        truncated: it was cut, by a turn limit or for want of room.
        error: class of the exception that ended it; None where nothing failed.
        error_message: what that exception said.
        close_error: what the environment said when it could not be closed; its score stands.
        metrics: numbers by name that the environment gave, summed over turns.
    """

    item: Item
    messages: list[Message] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    tool_calls: int = 0
    malformed_tool_calls: int = 0
    truncated: bool = False
    error: str | None = None
    error_message: str = ""
    close_error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """The return: the sum over turns. None where the episode failed or was not scored."""
        if self.error is not None or not self.rewards:
            return None
        scored = [reward for reward in self.rewards if reward is not None]
        return math.fsum(scored) if len(scored) == len(self.rewards) else None

    @property
    def played(self) -> bool:
        """Whether it came to an end, scored or not."""
        return self.error is None and bool(self.rewards)

    @property
    def unfinished(self) -> bool:
        """Whether the last turn was cut by a bound on its length: it has no stop token, which is
        not the same token in every model."""
        turns = [segment for segment in self.segments if segment.origin == "policy"]
        return bool(turns) and turns[-1].stop_reason == "length"

    def reaches(self, best: float) -> bool:
        """Whether the return is the best that there is, but for rounding."""
        reward = self.reward
        return reward is not None and (
            reward >= best or math.isclose(reward, best, rel_tol=1e-9, abs_tol=1e-9)
        )

    @property
    def token_ids(self) -> list[int]:
        """The whole sequence."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def turn_ends(self) -> list[int]:
        """Where in `token_ids` the last token of each of the policy's turns stands."""
        ends, place = [], -1
        for segment in self.segments:
            place += len(segment.token_ids)
            if segment.origin == "policy":
                ends.append(place)
        return ends

    @property
    def policy_mask(self) -> list[int]:
        """1 for each token that the policy wrote, else 0."""
        return [
            int(segment.origin == "policy") for segment in self.segments for _ in segment.token_ids
        ]

    @property
    def log_probs(self) -> list[float]:
        """As sampled; 0 for tokens that the policy did not write."""
        return [
            log_prob
            for segment in self.segments
            for log_prob in (segment.log_probs or [0.0] * len(segment.token_ids))
        ]

    def fail(self, error: BaseException) -> None:
        """Ends the episode; it is neither scored nor trained."""
        self.error = type(error).__name__
        self.error_message = str(error)

    def add_metrics(self, info: Mapping[str, object]) -> None:
        """Takes up `metrics` and `reward_components` of an environment's info."""
        for group in ("metrics", "reward_components"):
            named = info.get(group)
            if isinstance(named, Mapping):
                for name, value in named.items():
                    self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
