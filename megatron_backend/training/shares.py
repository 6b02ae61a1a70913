"""What each rank says of a step, and how that becomes one result. Free of Megatron."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.batch import MetricSums
from algorithms.protocols import StepResult
from service.spec.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """One rank's view of a step.

    Attributes:
        loss: the whole step's loss, equal on every rank.
        gradient_norm: of the whole gradient, before clipping, equal on every rank.
        finite: False where the step was not taken, equal on every rank.
        sums: metrics of this rank's own rows; empty on ranks that do not speak for theirs.
    """

    loss: float
    gradient_norm: float
    finite: bool
    sums: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare:
    """One rank's rows of a result.

    It holds no tensor: Megatron-Core patches how torch pickles tensors, so one that a rank sends
    could only be read where Megatron is imported, which the driver must not have to do.

    Attributes:
        rows: where in the whole batch they are.
        values: [rows, T], or of another shape that begins with rows.
    """

    rows: Sequence[int]
    values: NDArray[Any]


def gather_rows(layout: Layout, shares: Sequence[RowShare | None]) -> Tensor:
    """[B, T] (or [B, ...]) rows of a whole batch, from the shares of all ranks in order."""
    parts = [part for rank in layout.output_ranks if (part := shares[rank]) is not None]
    rows = torch.tensor([row for part in parts for row in part.rows])
    return torch.from_numpy(np.concatenate([part.values for part in parts]))[rows.argsort()]


def merge_step(layout: Layout, shares: Sequence[StepShare]) -> StepResult:
    """The step's result, from the shares of all ranks in order."""
    metrics = MetricSums()
    for rank in layout.output_ranks:
        metrics.add(shares[rank].sums)
    first = shares[0]
    return StepResult(
        loss=first.loss,
        gradient_norm=first.gradient_norm,
        metrics=metrics.means(),
        finite=first.finite,
        sums=metrics.sums(),
    )
