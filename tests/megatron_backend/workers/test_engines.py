"""What the driver's side of the ranks adds by itself."""

from typing import Any

import pytest
import torch

from algorithms.batch import Batch, Normalizer
from megatron_backend.training.shares import StepShare
from megatron_backend.workers import engines
from megatron_backend.workers.engines import RayTrainEngine
from service.spec.flops import update_flops
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import CONFIGS

MODEL = ModelConfig.from_hf(CONFIGS["llama"])
BATCH = Batch(
    tokens=torch.zeros(2, 6, dtype=torch.int64),
    lengths=torch.tensor([6, 4]),
    loss_mask=torch.tensor([[0.0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]),
)


class Group:
    """Four ranks whose step takes two seconds."""

    layout = Layout(tp=2, dp=2)
    own_seconds = (0.0,) * 4

    def __init__(self, gpu: str | None, clock: list[float]) -> None:
        self.gpu, self._clock = gpu, clock

    def call(self, *_: Any, **__: Any) -> list[StepShare]:
        self._clock[0] += 2.0
        share = StepShare(loss=1.5, gradient_norm=0.5, finite=True, sums={"entropy": (6.0, 3.0)})
        return [share] * 4


@pytest.mark.parametrize(("predicts", "predicted"), [(True, 5), (False, 0)])
@pytest.mark.parametrize(
    ("gpu", "peak"), [("NVIDIA H200", 9.89e14), ("a GPU of next year", None), (None, None)]
)
def test_an_update_says_how_fast_each_rank_was(
    monkeypatch: pytest.MonkeyPatch,
    predicts: bool,
    predicted: int,
    gpu: str | None,
    peak: float | None,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(engines.time, "monotonic", lambda: clock[0])
    group: Any = Group(gpu, clock)
    engine = RayTrainEngine(group, MODEL, predicts=predicts, warn=print)
    result = engine.train_step(BATCH, Normalizer.of(BATCH), learning_rate=0.1)
    rate = update_flops(MODEL, [6, 4], predicted) / 2.0 / 4
    speed = {"flops_per_second": rate} | ({} if peak is None else {"mfu": rate / peak})
    assert result.metrics == {"entropy": 2.0, **speed}
    assert (result.loss, result.gradient_norm, result.finite) == (1.5, 0.5, True)
