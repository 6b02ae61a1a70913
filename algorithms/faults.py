"""What becomes of a step that goes wrong: a loss that is no number, or one out of all measure.

Such a step is not taken, so nothing has changed, and the same step can be run again. That tells
three causes apart. If the second run is well, the first was a passing fault of the hardware or of a
race, and the second counts. If it goes wrong too, each half of the model's copies computes the step
alone: where one half is well, a device of the other one computes wrongly all the time, and the job
ends. Else data, model or learning rate are the cause, and the job's `faults.on_nan` or
`faults.on_spike` decides.

Everything here is a pure function of the steps so far, and its state is part of a checkpoint: a run
that is killed and resumed judges as one that is not.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

from algorithms.errors import JobFailure
from algorithms.protocols import StepResult, Trial
from service.spec import FaultSpec, Reason

ROUNDING = 0.05
"""Two numbers that differ by less, relative to the larger one, may be the same one, summed in
another order."""


class Fault(StrEnum):
    """How a step goes wrong."""

    NOT_FINITE = "not finite"
    SPIKE = "a spike"


class StepRefused(Exception):
    """A step went wrong twice and was not taken.

    Args:
        step: its number.
        fault: of the second run.
        first: what the first run gave.
        second: what the second run gave.
        of_critic: it was the critic's, and not the policy's.
        blamed: ranks that alone give it where others do not, for people; empty for none.
    """

    def __init__(
        self,
        step: int,
        fault: Fault,
        first: StepResult,
        second: StepResult,
        *,
        of_critic: bool = False,
        blamed: str = "",
    ) -> None:
        super().__init__(
            f"step {step}{' of the critic' if of_critic else ''}: {describe(fault, first)}; a "
            f"second run of the same step gave {describe(fault, second)}, so it is no passing "
            "fault of the hardware"
        )
        self.step, self.fault, self.blamed = step, fault, blamed
        self.rate = "algorithm.value_model" if of_critic else "optimizer"
        self.rate += ".learning_rate"


class StepGuard:
    """Judges the steps of one job.

    Attributes:
        left_out: steps that are not trained.

    Args:
        spec: the job's policies.
        losses: whether losses are judged too; see `AlgorithmSpec.comparable_loss`.
    """

    def __init__(self, spec: FaultSpec, *, losses: bool = False) -> None:
        self._spec = spec
        self._norms: deque[float] = deque(maxlen=spec.spike_window)
        self._losses: deque[float] = deque(maxlen=spec.spike_window if losses else 0)
        self.left_out: set[int] = set()

    @property
    def norm_limit(self) -> float:
        """The largest gradient norm that is no spike; infinite where nothing is one."""
        return self._limit(self._norms, self._spec.spike_factor)

    @property
    def loss_limit(self) -> float:
        """The largest loss that is no spike; infinite where nothing is one."""
        return self._limit(self._losses, self._spec.spike_loss_factor)

    def _limit(self, usual: Collection[float], factor: float) -> float:
        if self._spec.on_spike == "ignore" or len(usual) < self._spec.spike_window:
            return math.inf
        return factor * statistics.median(usual)

    def fault(self, result: StepResult) -> Fault | None:
        """What is wrong with a step that was tried under `norm_limit` and `loss_limit`."""
        if not result.finite:
            return Fault.NOT_FINITE
        usual = result.gradient_norm <= self.norm_limit and result.loss <= self.loss_limit
        return None if usual else Fault.SPIKE

    def blamed(self, trials: Sequence[Trial]) -> str:
        """The ranks that alone give a step that is wrong where others alone give a good one; empty
        where all agree, or differ by rounding alone."""
        wrong = [trial for trial in trials if self.fault(trial.result)]
        right = [trial for trial in trials if trial not in wrong]
        if all(_alike(one.result, other.result) for one in wrong for other in right):
            return ""
        return ", ".join(trial.ranks for trial in wrong)

    def took(self, result: StepResult) -> None:
        """A step was taken. One without a gradient had nothing to learn from, as a batch of groups
        without spread; it says nothing of what is usual. Nor does a loss of 0."""
        if result.gradient_norm > 0:
            self._norms.append(result.gradient_norm)
        if result.loss > 0:
            self._losses.append(result.loss)

    def policy(self, refused: StepRefused) -> Literal["skip", "rewind"]:
        """What to do about a step that is not taken, which is left out from now on.

        Raises:
            JobFailure: the job is to stop: NAN_LOSS, or NODE_FAILURE where a device is at fault,
                whose other steps are no better.
        """
        spec = self._spec
        if refused.blamed:
            raise JobFailure(
                Reason.NODE_FAILURE,
                f"{refused}. The whole step computed by {refused.blamed} alone is wrong as well, "
                "and computed by the others alone it is not: most likely a device there computes "
                "wrongly all the time, and what it computed before may be wrong too. Have it "
                "tested. The update was not taken",
            )
        name = "on_nan" if refused.fault is Fault.NOT_FINITE else "on_spike"
        policy: str = getattr(spec, name)
        if policy == "stop":
            raise JobFailure(
                Reason.NAN_LOSS,
                f"{refused}. The update was not taken. Lower `{refused.rate}`, look at "
                f"this step's data, or set `faults.{name}` to skip or rewind. The last checkpoint "
                "holds the weights before it",
            )
        self.left_out.add(refused.step)
        row = 0
        while refused.step - row in self.left_out:
            row += 1
        if row > spec.max_skipped:
            raise JobFailure(
                Reason.NAN_LOSS,
                f"{refused}. {row} steps in a row went wrong, and `faults.max_skipped` allows "
                f"{spec.max_skipped} to be left out. Lower `{refused.rate}`",
            )
        return "rewind" if policy == "rewind" else "skip"

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON values."""
        return {
            "norms": list(self._norms),
            "losses": list(self._losses),
            "left_out": sorted(self.left_out),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from what `state` returned; None from the start."""
        self._norms.clear()
        self._norms.extend(state["norms"] if state else ())
        self._losses.clear()
        # Checkpoints from before losses were judged have none.
        self._losses.extend(state.get("losses", ()) if state else ())
        self.left_out = set(state["left_out"] if state else ())


def _alike(one: StepResult, other: StepResult) -> bool:
    """Whether two results may be the same one but for rounding."""
    pairs = ((one.loss, other.loss), (one.gradient_norm, other.gradient_norm))
    return all(math.isclose(a, b, rel_tol=ROUNDING) for a, b in pairs)


def describe(fault: Fault, result: StepResult) -> str:
    """What was wrong, in numbers."""
    numbers = f"the loss is {result.loss:g} and the gradient norm {result.gradient_norm:g}"
    return f"{numbers}, {fault}"
