"""Episodes as if they had been played."""

from collections.abc import Sequence
from typing import Literal

from algorithms.rollout.episode import Episode, Segment
from algorithms.rollout.groups import Group


def turn(tokens: Sequence[int], stop_reason: Literal["stop", "length"] = "stop") -> Segment:
    """What the policy wrote in a turn."""
    return Segment(
        origin="policy",
        token_ids=tokens,
        log_probs=[-0.5] * len(tokens),
        weight_version=0,
        stop_reason=stop_reason,
    )


def episode(segments: Sequence[Segment], *rewards: float | None, **fields: object) -> Episode:
    """A prompt of two tokens, then these segments, with the reward of each turn."""
    prompt = Segment(origin="prompt", token_ids=[1, 2])
    return Episode(item={}, segments=[prompt, *segments], rewards=list(rewards), **fields)


def answer(*rewards: float | None) -> Episode:
    """An episode of short turns with these rewards."""
    said = Segment(origin="observation", token_ids=[3])
    segments = [part for _ in rewards for part in (turn([5, 6]), said)][:-1]
    return episode(segments, *rewards)


def group(number: int, *returns: float | None) -> Group:
    """A question and its answers, of one turn each."""
    return Group(item={"number": number}, episodes=[answer(value) for value in returns])
