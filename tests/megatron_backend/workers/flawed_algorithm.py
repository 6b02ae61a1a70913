"""An algorithm of another package: fine-tuning as it is, but for calls that go wrong, or that move
the random-number generators.

A job finds it by the entry point that `environment` puts on the path of its processes.
"""

import math
import time
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field

from algorithms.batch import Batch, LossOutput, Normalizer, Outputs
from algorithms.sft import Sft
from service.spec import SftSpec
from service.spec.algorithm import AlgorithmSpec
from service.spec.algorithms.aggregation import TokenAggregation


class FlawedSpec(AlgorithmSpec):
    """As `SftSpec`, with flaws."""

    type: Literal["flawed"] = "flawed"
    implementation: ClassVar[str] = f"{__name__}:Flawed"
    online: ClassVar[bool] = False
    summary: ClassVar[str] = "Fine-tuning that goes wrong"

    loss_aggregation: TokenAggregation = "token-mean"
    no_number: list[int] = Field(default=[])
    """Losses of these numbers, from 1, are NaN on every rank, as if their rows were to blame."""
    broken: bool = False
    """All losses are NaN on the last rank, as if its device were."""
    slow_seconds: float = 0.0
    """How much longer each loss takes on the last rank."""
    draws: bool = False
    """Each loss draws random numbers, of each rank another count, and leaves them unused."""


class Flawed(Sft):
    """Counts the losses of its rank, one a step and one more each time that a step is run again."""

    def __init__(self, spec: FlawedSpec) -> None:
        super().__init__(SftSpec(loss_aggregation=spec.loss_aggregation))
        self._flaws, self._count = spec, 0

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        found = super().loss(outputs, batch, normalizer)
        self._count += 1
        wrong = self._count in self._flaws.no_number
        if self._flaws.draws:
            _draw(torch.distributed.get_rank() + 1)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            time.sleep(self._flaws.slow_seconds)
            wrong |= self._flaws.broken
        return LossOutput(loss=found.loss * (math.nan if wrong else 1.0), sums=found.sums)


def _draw(count: int) -> None:
    """From the generators that a checkpoint holds."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.rand(count)
    with get_cuda_rng_tracker().fork():
        torch.rand(count)


def environment(folder: Path) -> dict[str, str]:
    """Variables of processes that are to know the algorithm; its entry point goes to `folder`."""
    info = folder / "flawed-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flawed\nVersion: 1\n")
    spec = f"{FlawedSpec.__module__}:{FlawedSpec.__name__}"
    (info / "entry_points.txt").write_text(f"[planish.algorithms]\nflawed = {spec}\n")
    root = Path(__file__).parents[3]
    return {"PYTHONPATH": f"{folder}:{root}"}
