"""What the ranks do in tests of the offloaded optimizer: Megatron's own, on a machine without GPU.

What it keeps and updates in the machine's memory are copies of what it finds on a GPU. Here a mark
says which tensors count as the GPU's; all else is Megatron's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from algorithms.batch import Normalizer
from service.spec import OptimizerSpec, SftSpec
from service.spec.layout import Layout
from tests.megatron_backend.training.training_runs import (
    LEARNING_RATE,
    build_trainer,
    random_batch,
)

if TYPE_CHECKING:
    from megatron_backend.training.step import Trainer

type Steps = list[tuple[float, float]]
"""Loss and gradient norm of each."""


@contextmanager
def weights_seem_on_a_gpu() -> Iterator[None]:
    """To Megatron's offloading optimizer; memory cannot be pinned here."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    split = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def marked(self: Any, fraction: float) -> Any:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            parameter.seems_on_gpu = True
        is_cuda = property(lambda tensor: getattr(tensor, "seems_on_gpu", False))
        with (
            mock.patch.object(torch.Tensor, "is_cuda", is_cuda),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return split(self, fraction)

    with mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", marked):
        yield


def trainer(name: str, layout: Layout, dtype: torch.dtype, *, offload: bool) -> "Trainer":
    """As a job's; one that offloads is built as on a GPU."""
    from megatron_backend.training import optimizer

    spec = OptimizerSpec(weight_decay=0.1, offload=offload)
    build = optimizer.build_optimizer

    def as_on_a_gpu(*args: Any, **options: Any) -> Any:
        optimizer._use_our_adam()  # Megatron asks for Transformer Engine's, and never calls it
        with mock.patch.object(optimizer.cpu, "active", return_value=False):
            return build(*args, **options)

    with mock.patch.object(optimizer, "build_optimizer", as_on_a_gpu if offload else build):
        return build_trainer(name, layout, SftSpec(), dtype=dtype, optimizer_spec=spec)


def train(trained: "Trainer", first: int, count: int) -> Steps:
    """Steps on batches of their own."""
    results = []
    for seed in range(first, first + count):
        batch = random_batch(seed=seed)
        share = trained.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
        results.append((share.loss, share.gradient_norm))
    return results


def offload(
    _rank: int, name: str, layout: Layout, dtype: torch.dtype, folder: Path
) -> tuple[Steps, Steps, list[Steps], list[tuple[str, float]]]:
    """Three steps without and with offloading; two of them again from a checkpoint after the first,
    of the offloaded optimizer in one that offloads and one that does not, and the other way round;
    classes of the optimizers that offload, and what share of the weights they do it with."""
    from megatron_backend.checkpoint.torch_dist import load_state, save_state

    plain = trainer(name, layout, dtype, offload=False)
    expected = train(plain, 0, 1)
    save_state(folder / "plain", {"": plain})
    expected += train(plain, 1, 2)
    again = []
    with weights_seem_on_a_gpu():
        offloaded = trainer(name, layout, dtype, offload=True)
        found = train(offloaded, 0, 1)
        save_state(folder / "offloaded", {"": offloaded})
        found += train(offloaded, 1, 2)
        for saved, then in (("offloaded", True), ("offloaded", False), ("plain", True)):
            resumed = trainer(name, layout, dtype, offload=then)
            load_state(folder / saved, {"": resumed}, same_layout=True)
            again.append(train(resumed, 1, 2))
    parts = [part.optimizer for part in offloaded.optimizer.chained_optimizers]
    return expected, found, again, [(type(one).__name__, one.offload_fraction) for one in parts]


def offload_fp32(_rank: int) -> str:
    """What Megatron says of float32."""
    with weights_seem_on_a_gpu():
        try:
            trainer("qwen2", Layout(), torch.float32, offload=True)
        except ValueError as error:
            return str(error)
    return ""
