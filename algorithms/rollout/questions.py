"""Which questions are trained on, and which are held out.

Training questions have an order that depends on the environment's seed alone, and places in it. A
job that knows its place asks after a resume what the uninterrupted one would have asked. A question
that is held out is never trained on, by its key, even where two seeds happen to draw it.
"""

from collections.abc import Collection

from pydantic import BaseModel

from environments.protocol import EnvironmentType, Item

ENOUGH_DRAWS = 256
"""Draws after which a source may be taken to have nothing else."""


def held_out_items(
    environment: EnvironmentType, config: BaseModel, *, seed: int, count: int
) -> list[Item]:
    """The first `count` different questions of the seed; fewer where the source has fewer.

    A generator never ends, but may have few different questions: one that gives none that is new in
    as many draws as all before, at least `ENOUGH_DRAWS`, has no more.
    """
    wanted, known = count, 0
    while True:
        drawn = environment.items(config, seed=seed, count=wanted)
        different: dict[str, Item] = {}
        for item in drawn:
            different.setdefault(environment.key(item), item)
        exhausted = len(drawn) < wanted or (wanted > ENOUGH_DRAWS and len(different) == known)
        if len(different) >= count or exhausted:
            return list(different.values())[:count]
        wanted, known = 2 * wanted, len(different)


class Questions:
    """Training questions in the environment's own order, without those that are held out.

    A finite source begins again when it is used up.
    """

    def __init__(
        self,
        environment: EnvironmentType,
        config: BaseModel,
        *,
        seed: int,
        held_out: Collection[str] = (),
    ) -> None:
        self._environment = environment
        self._config = config
        self._seed = seed
        self._held_out = frozenset(held_out)
        self._drawn = 0
        self._exhausted = False
        self._items: list[Item] = []

    def at(self, start: int, count: int) -> list[Item]:
        """The `count` questions from place `start` on; the first has place 0.

        Raises:
            ValueError: the source has no question that is not held out.
        """
        end = start + count
        while len(self._items) < end and not self._exhausted:
            self._draw_more(end)
        if not self._items:
            raise ValueError(
                f"environment {self._environment.id} has no training question that is not held "
                "out; evaluate on fewer `evaluation.items`"
            )
        return [self._items[place % len(self._items)] for place in range(start, end)]

    def _draw_more(self, needed: int) -> None:
        """Doubles the prefix that is known: `items` gives the same beginning for a larger count."""
        wanted = max(2 * self._drawn, needed + len(self._held_out))
        drawn = self._environment.items(self._config, seed=self._seed, count=wanted)
        fresh = [
            item
            for item in drawn[self._drawn :]
            if self._environment.key(item) not in self._held_out
        ]
        self._exhausted = len(drawn) < wanted or (wanted > ENOUGH_DRAWS and not fresh)
        self._items += fresh
        self._drawn = len(drawn)
