"""What the ranks of a training test do, and the batches they are given."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.protocols import Loss
from megatron_backend.models.tensors import RandomTensors
from megatron_backend.training.shares import RowShare, StepShare
from service.spec import AlgorithmSpec, OptimizerSpec, SftSpec
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from tests.megatron_backend.small_models import CONFIGS

if TYPE_CHECKING:
    from megatron_backend.training.step import Trainer

LEARNING_RATE = 3e-3


def random_batch(rows: int = 6, length: int = 13, *, seed: int = 3, vocab: int = 101) -> Batch:
    """Rows of different lengths with advantages and log-probs, as an algorithm would have them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, length + 1, (rows,), generator=generator)
    lengths[0] = length
    positions = torch.arange(length)
    answers = positions >= lengths.unsqueeze(1) // 2
    mask = (answers & (positions < lengths.unsqueeze(1))).float()
    old = -torch.rand(rows, length, generator=generator) - 4.5
    return Batch(
        tokens=torch.randint(0, vocab, (rows, length), generator=generator),
        lengths=lengths,
        loss_mask=mask,
        per_token={
            "old_log_probs": old,
            "reference_log_probs": old + 0.3 * torch.randn(rows, length, generator=generator),
            "advantages": torch.randn(rows, 1, generator=generator).expand(rows, length),
        },
    )


def build_trainer(
    name: str,
    layout: Layout,
    algorithm: AlgorithmSpec | Loss,
    *,
    head: Head = "vocabulary",
    micro_batch_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    packing: bool = True,
    micro_batch_tokens: int = 16384,
    recompute: Any = "none",
    optimizer_spec: OptimizerSpec | None = None,
    **sizes: Any,
) -> "Trainer":
    """A trainer of a small random model, the same in every layout."""
    from megatron_backend.models.build import build_model
    from megatron_backend.models.weights import load_weights
    from megatron_backend.training.step import Trainer

    config = ModelConfig.from_hf(CONFIGS[name] | sizes)
    model = build_model(config, layout, dtype=dtype, recompute=recompute, head=head)
    load_weights(model, config, RandomTensors(config, 1, head))
    return Trainer(
        model,
        config,
        layout,
        loss=load_algorithm(algorithm) if isinstance(algorithm, AlgorithmSpec) else algorithm,
        optimizer_spec=optimizer_spec or OptimizerSpec(weight_decay=0.1),
        dtype=dtype,
        temperature=temperature,
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=micro_batch_tokens,
        packing=packing,
    )


def train(
    _rank: int,
    name: str,
    layout: Layout,
    algorithm: AlgorithmSpec,
    batches: Sequence[Batch],
    options: dict[str, Any],
) -> list[StepShare]:
    """One step for each batch."""
    trainer = build_trainer(name, layout, algorithm, **options)
    return [
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
        for batch in batches
    ]


def log_probs(
    _rank: int,
    name: str,
    layout: Layout,
    batches: Sequence[Batch],
    options: Sequence[dict[str, Any]],
) -> list[list[RowShare | None]]:
    """Log-probs of this rank's rows of each batch, in a trainer for each of `options`."""
    trainers = [build_trainer(name, layout, SftSpec(), **chosen) for chosen in options]
    return [[trainer.log_probs(batch) for batch in batches] for trainer in trainers]


def train_fp16(_rank: int, layout: Layout, scale: float, batches: Sequence[Batch]) -> Any:
    """One step for each batch in float16 from a loss scale on; the shares, and the last scale."""
    from megatron_backend.training import optimizer

    trainer = build_trainer("qwen3_moe", layout, SftSpec(), dtype=torch.float16)
    for part in trainer.optimizer.chained_optimizers:
        part.grad_scaler._scale.fill_(scale)
    shares = [
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
        for batch in batches
    ]
    return shares, optimizer.loss_scale(trainer.optimizer)
