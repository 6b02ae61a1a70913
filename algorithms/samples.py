"""What a source of training data hands to the loop for one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from algorithms.batch import Batch
from algorithms.phases import PhaseClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One step's sequences.

    Attributes:
        batch: B sequences; `loss_mask` marks what may be trained.
        rewards: of each group, in the batch's order (B in all); None for offline data.
        metrics: numbers by name for the step's `metrics` event.
        warnings: for the step's `warning` events.
    """

    batch: Batch
    rewards: Sequence[Sequence[float | None]] | None = None
    metrics: Mapping[str, float]
    warnings: Sequence[Mapping[str, Any]] = ()


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
