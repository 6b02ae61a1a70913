"""What the driver's side of the ranks adds by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.batch import Batch
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


@pytest.mark.parametrize(("predicts", "predicted"), [(True, 5), (False, 0)])
def test_the_speed_of_an_update_is_of_each_rank(predicts: bool, predicted: int) -> None:
    work = update_flops(MODEL, [6, 4], predicted)
    for gpu, share in (("NVIDIA H200", work / 8 / 9.89e14), ("some GPU", None), (None, None)):
        group: Any = SimpleNamespace(layout=Layout(tp=2, dp=2), gpu=gpu)
        engine = RayTrainEngine(group, MODEL, predicts=predicts, warn=print)
        speed = engine._speed(BATCH, seconds=2.0)
        assert speed["flops_per_second"] == work / 8
        assert speed.get("mfu") == share
