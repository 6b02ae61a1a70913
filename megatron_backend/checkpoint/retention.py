"""Which checkpoints stay, and which is the best. Pure functions; nothing is deleted here."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from service.spec import BestSpec, CheckpointSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays beside the newest checkpoint, which always does.

    Attributes:
        last: how many of the newest stay.
        every: checkpoints of steps that this divides stay; None keeps none for that.
        best: what makes the best one, which stays; None keeps none for that.
    """

    last: int = 1
    every: int | None = None
    best: BestSpec | None = None

    @classmethod
    def of(cls, spec: CheckpointSpec) -> Self:
        """What a job's `checkpoint` asks for."""
        return cls(last=spec.keep_last, every=spec.keep_every, best=spec.keep_best)

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps that stay.

        Args:
            scores: score of each published step; None where it has none.
        """
        steps = sorted(scores)
        stay = set(steps[-max(self.last, 1) :])
        if self.every is not None:
            stay |= {step for step in steps if step % self.every == 0}
        best = self.best_step(scores)
        return stay if best is None else stay | {best}

    def best_step(self, scores: Mapping[int, float | None]) -> int | None:
        """The step with the best score, of equal ones the newest; None where no step has one."""
        if self.best is None:
            return None
        sign = 1 if self.best.higher_is_better else -1
        ranked = [(sign * score, step) for step, score in scores.items() if score is not None]
        return max(ranked)[1] if ranked else None


def score_of(evaluations: Iterable[Mapping[str, Any]], best: BestSpec | None) -> float | None:
    """The number that `best` names; None where no evaluation has it, or where it is no number.

    Args:
        evaluations: data of a step's `evaluation` events, in order.
        best: as the job has it.
    """
    if best is None:
        return None
    mode, _, name = best.metric.rpartition("/")
    for data in evaluations:
        value = data.get(name)
        wanted = not mode or data.get("mode") == mode
        if wanted and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if math.isfinite(value) else None
    return None
