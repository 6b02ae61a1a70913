"""What our ranks do to be timed: save in the foreground and behind training, load in other layouts.

Weights are random, and the optimizer has taken a step, so that all of Adam's state is there.
"""

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from service.spec.layout import Layout
from tests.bench.sides.fixed_llama import hf_config

LENGTH = 16
SAVES = 3
LAST = f"stall-{SAVES - 1}"
"""The folder that is left, with what was saved last."""


def build(layout: Layout, sizes: dict[str, int]) -> Any:
    """A trainer of the case's model."""
    from algorithms.sft import Sft
    from megatron_backend.models.build import build_model
    from megatron_backend.models.tensors import RandomTensors
    from megatron_backend.models.weights import load_weights
    from megatron_backend.training.step import Trainer
    from service.spec import OptimizerSpec, SftSpec
    from service.spec.model_config import ModelConfig

    config = ModelConfig.from_hf(hf_config(sizes))
    model = build_model(config, layout, max_length=LENGTH)
    load_weights(model, config, RandomTensors(config, 1))
    return Trainer(
        model,
        config,
        layout,
        loss=Sft(SftSpec()),
        optimizer_spec=OptimizerSpec(),
        dtype=torch.float32,
    )


def take_step(trainer: Any) -> None:
    """One small step."""
    from algorithms.batch import Batch, Normalizer

    mask = torch.ones(2, LENGTH)
    mask[:, 0] = 0
    batch = Batch(
        tokens=torch.arange(2 * LENGTH).view(2, LENGTH) + 3,
        lengths=torch.full((2,), LENGTH),
        loss_mask=mask,
    )
    trainer.train_step(batch, Normalizer.of(batch), learning_rate=1e-3)


def save(
    rank: int, layout: Layout, sizes: dict[str, int], folder: Path
) -> dict[str, float | list[float]]:
    """Seconds of saves: medians of all but the first of each kind, which makes plans and memory."""
    from megatron_backend.checkpoint import contents
    from megatron_backend.checkpoint.torch_dist import StateWriter

    trainer = build(layout, sizes)
    take_step(trainer)
    writer = StateWriter()
    times: dict[str, list[float]] = {"save": [], "stall": [], "background": []}
    for kind, background in (("save", False), ("stall", True)):
        for attempt in range(SAVES):
            staged = folder / f"{kind}-{attempt}"
            if rank == 0:
                for name in (contents.STATE, contents.RANDOM):
                    (staged / name).mkdir(parents=True)
            dist.barrier()
            start = time.perf_counter()
            written = writer.begin(staged, {"": trainer}, background=background)
            dist.barrier()
            times[kind].append(time.perf_counter() - start)
            if written is None:
                written = writer.result(wait=True)
                dist.barrier()
                times["background"].append(time.perf_counter() - start)
            if written is None or written.error:
                raise RuntimeError(f"the save failed: {written}")
            dist.barrier()
            if rank == 0 and attempt:
                shutil.rmtree(folder / f"{kind}-{attempt - 1}")
    writer.close()
    seconds: dict[str, float | list[float]] = {n: median(each[1:]) for n, each in times.items()}
    return seconds | {"sums": _sums(trainer)}


def load(_rank: int, layout: Layout, sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Seconds of a load in another layout."""
    from megatron_backend.checkpoint.torch_dist import load_state

    trainer = build(layout, sizes)
    take_step(trainer)
    dist.barrier()
    start = time.perf_counter()
    load_state(folder / LAST, {"": trainer}, same_layout=False)
    dist.barrier()
    return {"seconds": time.perf_counter() - start, "sums": _sums(trainer)}


def _sums(trainer: Any) -> list[float]:
    """The sums of absolute values and of squares of all weights, each counted once."""
    total = torch.zeros(2, dtype=torch.float64)
    for chunk in trainer.chunks:
        for parameter in chunk.module.parameters():
            whole = parameter.detach().double()
            # Norms are on every tensor-parallel rank, and only one may count.
            share = 1 if getattr(parameter, "tensor_model_parallel", False) else trainer._layout.tp
            total += torch.stack([whole.abs().sum(), whole.square().sum()]) / share
    dist.all_reduce(total)
    return [float(value) for value in total]
