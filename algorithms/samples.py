"""What a source of training data hands to the loop for one step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from algorithms.batch import Batch
from algorithms.phases import PhaseClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Episodes that the policy played, with what they earned.

    Attributes:
        batch: B sequences; `loss_mask` marks the policy's own tokens. Rows that were not scored
            keep their place, and none of their tokens is trained.
        rewards: [B, T] float64: each turn's reward at the turn's last token, 0 elsewhere.
        scored: [B] bool. What was not scored is not 0: it takes no part in any statistics.
        group_size: so many rows, one behind the other, answer one question.
        baselines: [B] float64, the reward of the greedy answer to a row's question; NaN where that
            could not be scored. None where the spec asks for none.
    """

    batch: Batch
    rewards: Tensor
    scored: Tensor
    group_size: int = 1
    baselines: Tensor | None = None

    @property
    def returns(self) -> Tensor:
        """[B] float64, the sum of each row's rewards."""
        return self.rewards.double().sum(dim=1)

    @property
    def last(self) -> Tensor:
        """[B] int64: place of each row's last trained token; 0 where none is trained."""
        places = torch.arange(self.batch.loss_mask.shape[1])
        return (places * (self.batch.loss_mask > 0)).amax(dim=1)

    def with_baselines(self, greedy: "Rollout") -> "Rollout":
        """The same, with what the greedy answers earned; `greedy` has a row for each group.

        A row whose greedy answer has no score counts as not scored itself: there is nothing to
        measure it against.
        """
        values = greedy.returns.masked_fill(~greedy.scored, math.nan)
        baselines = values.repeat_interleave(self.group_size)
        return replace(self, baselines=baselines, scored=self.scored & baselines.isfinite())


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One step's sequences.

    Attributes:
        batch: B sequences; `loss_mask` marks what may be trained.
        rollout: what they earned, with the very same batch; None for offline data.
        greedy: the greedy answers to the same questions, one row each, which are not trained; None
            where the spec asks for none.
        metrics: numbers by name for the step's `metrics` event.
        warnings: for the step's `warning` events.
        rows: of offline data, which row of the file each unit of the batch is: what does not
            change with the model is computed once for each.
    """

    batch: Batch
    rollout: Rollout | None = None
    greedy: Rollout | None = None
    metrics: Mapping[str, float]
    warnings: Sequence[Mapping[str, Any]] = ()
    rows: Sequence[int] | None = None


class Source(Protocol):
    """Rows of a file, or episodes that the policy plays."""

    online: bool
    """True where the samples come from the policy, which must then be synced to the generator."""
    total_steps: int
    """How many steps the job takes."""

    def draw(self, step: int, clock: PhaseClock) -> Samples:
        """The samples of step 1, 2, ..."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        ...
