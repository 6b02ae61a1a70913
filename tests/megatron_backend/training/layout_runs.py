"""What the ranks of a layout do in test_layouts.py: several cases in one start, with gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from algorithms.batch import Batch, Normalizer
from algorithms.protocols import Loss
from megatron_backend.training.shares import StepShare
from service.spec import AlgorithmSpec, OptimizerSpec
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import CONFIGS
from tests.megatron_backend.training.training_runs import (
    LEARNING_RATE,
    build_trainer,
    random_batch,
)
from tests.megatron_backend.training.value_runs import random_pairs

if TYPE_CHECKING:
    from megatron_backend.training.step import Trainer

STEPS = 3
# Adam turns the rounding of a gradient near 0 into a whole step: small steps, small differences.
RATE = LEARNING_RATE / 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run.

    Attributes:
        name: of the case, and of its folder.
        model: one of `CONFIGS`.
        sizes: changes to it.
        algorithm: whose loss, or a loss.
        options: of `build_trainer`.
        head: what the model says of a token.
    """

    name: str
    model: str
    algorithm: AlgorithmSpec | Loss
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    head: Head = "vocabulary"

    def batch(self, step: int) -> Batch:
        """What a step trains on; pairs for a model with a value head."""
        make = random_batch if self.head == "vocabulary" else random_pairs
        return make(seed=step, vocab=self.config.vocab_size)

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return ModelConfig.from_hf(CONFIGS[self.model] | dict(self.sizes))


def play(_rank: int, layout: Layout, cases: Sequence[Case], folder: Path) -> list[list[StepShare]]:
    """Trains every case; the whole gradient of each step goes to `folder`/CASE/STEP."""
    return [_play(layout, case, folder / case.name) for case in cases]


def _play(layout: Layout, case: Case, folder: Path) -> list[StepShare]:
    trainer = build_trainer(
        case.model,
        layout,
        case.algorithm,
        # Clipping would multiply the gradients that are compared.
        optimizer_spec=OptimizerSpec(weight_decay=0.1, clip_grad=0.0),
        head=case.head,
        **case.options,
        **case.sizes,
    )
    shares = []
    for step in range(STEPS):
        batch = case.batch(step)
        shares.append(trainer.train_step(batch, Normalizer.of(batch), learning_rate=RATE))
        write_gradient(trainer, layout, case.config, folder / str(step))
    return shares


def write_gradient(trainer: "Trainer", layout: Layout, config: ModelConfig, folder: Path) -> None:
    """The whole gradient as Hugging Face tensors, so that no layout is left in it.

    Each data-parallel rank has a flat shard of it in the optimizer. They are put together by hand,
    and written by the exporter in the place of the weights.
    """
    from megatron_backend.models.export import export_hf

    chunks = [chunk.module for chunk in trainer.chunks]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(_gradient(trainer, parameter))
    export_hf(chunks, config, layout, folder)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


def _gradient(trainer: "Trainer", parameter: torch.nn.Parameter) -> torch.Tensor:
    from megatron.core import parallel_state

    whole = torch.zeros(parameter.numel())
    for part in trainer.optimizer.chained_optimizers:
        if parameter in part.model_param_gbuf_map:
            span = part._get_model_param_range_map(parameter)["param"]
            index, order = part.model_param_group_index_map[parameter]
            shard = part.optimizer.param_groups[index]["params"][order]
            whole[span.start : span.end] = shard.grad.reshape(-1)
    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_expert_data_parallel_group()
    torch.distributed.all_reduce(whole, group=group)
    return whole.reshape(parameter.shape)
