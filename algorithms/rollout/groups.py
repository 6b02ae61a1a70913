"""The answers to one question, and which questions a step is trained on.

Answers that all earned the same teach an algorithm nothing that measures them against each other.
Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) asks further questions in their place. It
goes by the environment's reward alone: a penalty for length, or the score of a reward model, tells
any two answers apart, also where both are right.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from algorithms.advantages.group import has_spread
from algorithms.rollout.episode import Episode
from environments.protocol import Item
from service.spec import DynamicSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A question and its answers, one episode each."""

    item: Item
    episodes: Sequence[Episode]

    @property
    def has_spread(self) -> bool:
        """Whether rewards differ by more than rounding; never with fewer than two scored ones."""
        return has_spread([episode.reward for episode in self.episodes])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The groups of one step.

    Attributes:
        trained: what the step learns from.
        masked: without spread; they fill the batch where `trained` does not, and train nothing.
        played: all groups, in the order of their questions.
        batches: how often the generator was given questions.
        used: so many questions are done with. Later ones were played for nothing, and are asked
            again.
    """

    trained: Sequence[Group]
    masked: Sequence[Group]
    played: Sequence[Group]
    batches: int
    used: int

    @property
    def groups(self) -> list[Group]:
        """Of the batch."""
        return [*self.trained, *self.masked]


Play = Callable[[int, int, int], Sequence[Group]]
"""Plays `count` questions from the `start`-th of a step on, as its batch of this number."""


def draw_all(play: Play, count: int) -> Drawn:
    """One batch, as it comes."""
    groups = play(0, count, 0)
    return Drawn(trained=groups, masked=[], played=groups, batches=1, used=count)


def draw_with_spread(play: Play, count: int, rule: DynamicSampling) -> Drawn:
    """Batches until `count` groups have spread, or until there were `rule.max_batches`.

    The first has `count` questions; a later one as many as it should take by the share so far, so
    that few are played for nothing.
    """
    kept: list[Group] = []
    without: list[Group] = []
    played: list[Group] = []
    batches, wanted = 0, count
    while len(kept) < count and batches < rule.max_batches:
        groups = play(len(kept) + len(without), wanted, batches)
        batches += 1
        played += groups
        for group in groups:
            if len(kept) < count:
                (kept if group.has_spread else without).append(group)
        missing, asked = count - len(kept), len(kept) + len(without)
        wanted = min(math.ceil(missing * asked / len(kept)), count) if kept else count
    return Drawn(
        trained=kept,
        masked=without[: count - len(kept)],
        played=played,
        batches=batches,
        used=len(kept) + len(without),
    )


def describe_shortage(drawn: Drawn, best_reward: float) -> str:
    """What a step that could not be filled is told as, for people."""
    without = [group for group in drawn.played if not group.has_spread]
    best = sum(all(e.reaches(best_reward) for e in group.episodes) for group in without)
    unscored = sum(sum(e.reward is not None for e in group.episodes) < 2 for group in without)
    return (
        f"only {len(drawn.trained)} of the {len(drawn.groups)} groups of the step have answers of "
        f"different reward, after {len(drawn.played)} questions in {drawn.batches} batches "
        f"(`algorithm.dynamic_sampling.max_batches`); of the {len(without)} others, {best} have "
        f"the best reward in every answer, {unscored} have fewer than two answers with a reward, "
        f"and {len(without) - best - unscored} the same lower reward in all"
    )
