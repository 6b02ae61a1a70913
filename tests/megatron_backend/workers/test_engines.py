"""What the driver's side of the ranks adds by itself."""

from typing import Any

import pytest
import torch

from algorithms.batch import Batch, Normalizer
from megatron_backend.training.shares import StepShare
from megatron_backend.workers import engines
from megatron_backend.workers.engines import RayCritic, RayTrainEngine
from megatron_backend.workers.rank import RankWorker
from megatron_backend.workers.stragglers import IN_A_ROW
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
    own_seconds: tuple[float, ...] = (0.0,) * 4
    addresses = tuple(f"10.0.0.{rank}" for rank in range(24))

    def __init__(self, gpu: str | None, clock: list[float]) -> None:
        self.gpu, self._clock = gpu, clock
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def call(self, method: Any, *_: Any, **options: Any) -> list[StepShare]:
        self.calls.append((method, options))
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


@pytest.mark.parametrize(
    ("critic", "begins"), [(False, "rank 3 is"), (True, "training the critic, rank 3 is")]
)
def test_a_rank_that_stays_slow_is_told(critic: bool, begins: str) -> None:
    """By its own seconds of this model's steps: those of other calls are not counted."""
    group: Any = Group(None, [0.0])
    told: list[str] = []
    engine: RayCritic | RayTrainEngine = (
        RayCritic(group, warn=told.append)
        if critic
        else RayTrainEngine(group, MODEL, predicts=True, warn=told.append)
    )
    for step in range(1, IN_A_ROW + 1):
        assert not told, step
        group.own_seconds = (1.0, 1.1, 0.9, 2.5)
        engine.train_step(BATCH, Normalizer.of(BATCH), learning_rate=0.1)
        group.own_seconds = (9.0, 0.0, 0.0, 0.0)  # of a call that is no step
    (message,) = told
    assert message.startswith(begins)
    assert f"for {IN_A_ROW} steps in a row" in message
    assert "2.50 s, the median rank for 1.00 s" in message
    model = "critic" if critic else "policy"
    assert [(called, options["model"]) for called, options in group.calls] == [
        (RankWorker.train_step, model)
    ] * IN_A_ROW


def test_a_step_s_limits_reach_the_ranks() -> None:
    group: Any = Group(None, [0.0])
    engine = RayTrainEngine(group, MODEL, predicts=True, warn=print)
    limits = {"learning_rate": 0.1, "norm_limit": 3.0, "loss_limit": 4.0}
    engine.train_step(BATCH, Normalizer.of(BATCH), **limits)
    assert group.calls == [(RankWorker.train_step, {**limits, "model": "policy"})]


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize(
    ("layout", "halves"),
    [
        (Layout(tp=4, pp=2), []),
        (Layout(dp=2), [[0], [1]]),
        (Layout(tp=2, pp=2, dp=3), [[0], [1, 2]]),
        (Layout(dp=4, ep=2), [[0, 1], [2, 3]]),  # copies that share experts are on one side
        (Layout(dp=2, ep=2), []),
        (Layout(cp=2, dp=2, ep=2), [[0], [1]]),  # experts are shared inside each copy
        (Layout(cp=2, dp=6, ep=4), [[0, 1], [2, 3, 4, 5]]),
    ],
    ids=str,
)
def test_halves_of_the_copies_try_a_step_alone(
    layout: Layout, halves: list[list[int]], critic: bool
) -> None:
    group: Any = Group(None, [0.0])
    group.layout = layout
    group.call = lambda *args, **options: Group.call(group, *args, **options) * 6
    engine: RayCritic | RayTrainEngine = (
        RayCritic(group, warn=print)
        if critic
        else RayTrainEngine(group, MODEL, predicts=True, warn=print)
    )
    trials = engine.trials(BATCH, Normalizer.of(BATCH))
    assert [list(options["copies"]) for _, options in group.calls] == halves
    for method, options in group.calls:
        assert method is RankWorker.train_step
        assert options["model"] == ("critic" if critic else "policy")
        assert options["norm_limit"] < 0  # not to be taken
    for trial, half in zip(trials, halves, strict=True):
        assert trial.result.loss == 1.5
        ranks = [r for r in range(layout.world_size) if layout.coordinates(r).dp in half]
        assert trial.ranks == "rank " + ", ".join(f"{rank} (10.0.0.{rank})" for rank in ranks)
