"""What the ranks of the tests of faults do."""

import math
from typing import Any

import torch

from algorithms.batch import Batch, LossOutput, Normalizer, Outputs
from algorithms.sft import Sft
from megatron_backend.training.shares import StepShare
from service.spec import Fp8Spec, SftSpec
from service.spec.layout import Layout
from tests.megatron_backend.fp8_runs import trainer_with
from tests.megatron_backend.training.training_runs import LEARNING_RATE, build_trainer, random_batch


def tied_steps(_rank: int, layout: Layout, steps: int) -> tuple[list[Any], Any]:
    """`tied_difference` after each of some steps, and after one copy alone was changed."""
    from megatron.core import parallel_state

    from megatron_backend.training.tied import tied_difference

    trainer = build_trainer("qwen2-tied", layout, SftSpec(), num_hidden_layers=4)
    model = [chunk.module for chunk in trainer.chunks]
    differences = []
    for seed in range(steps):
        batch = random_batch(seed=seed)
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
        differences.append(tied_difference(model))
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        model[-1].shared_embedding_or_output_weight().data[3, 5] += 0.25
    return differences, tied_difference(model)


def refused_steps(_rank: int, layout: Layout) -> list[Any]:
    """Whether weights moved in steps above their limits and then at them, their norms and losses,
    and whether those were finite."""
    trainer = build_trainer("qwen2-tied", layout, SftSpec())
    batch = random_batch()
    normalizer = Normalizer.of(batch)

    def weights() -> list[Any]:
        return [p.detach().clone() for chunk in trainer.chunks for p in chunk.parameters()]

    def moved(norm_limit: float, loss_limit: float) -> tuple[bool, float, float, bool]:
        before = weights()
        share = trainer.train_step(
            batch,
            normalizer,
            learning_rate=LEARNING_RATE,
            norm_limit=norm_limit,
            loss_limit=loss_limit,
        )
        changed = any(not a.equal(b) for a, b in zip(before, weights(), strict=True))
        return changed, share.gradient_norm, share.loss, share.finite

    first = moved(0.01, math.inf)
    _, norm, loss, _ = first
    return [
        first,
        moved(0.01, loss),
        moved(norm, math.nextafter(loss, -math.inf)),
        moved(norm, loss),
    ]


class BrokenSft(Sft):
    """As on a device that gives no number, whatever it computes."""

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        found = super().loss(outputs, batch, normalizer)
        return LossOutput(loss=found.loss * math.nan, sums=found.sums)


def memory_of_refused_steps(_rank: int, layout: Layout, fp8: Fp8Spec | None) -> list[Any]:
    """What FP8 and fp16 remember: at first, after a step above its limit, after one whose loss is
    no number, and after one that is taken; and that of a trainer which was given the last alone."""
    from megatron_backend.fp8_emulation import delayed_roundings
    from megatron_backend.training.optimizer import loss_scalers

    batch = random_batch()

    def memory(trainer: Any) -> list[Any]:
        scalers = [scaler.state_dict() for scaler in loss_scalers(trainer.optimizer)]
        seen = [r.memory for chunk in trainer.model for r in delayed_roundings(chunk)]
        return [*seen, *scalers]

    def after(trainer: Any, **limits: float) -> list[Any]:
        order = Normalizer.of(batch)
        share = trainer.train_step(batch, order, learning_rate=LEARNING_RATE, **limits)
        return [share.loss, share.gradient_norm, *memory(trainer)]

    def new() -> Any:
        trainer = trainer_with(fp8, layout, dtype=torch.float16)
        after(trainer)  # there is something to remember
        return trainer

    tried, calm = new(), new()
    loss, broken = tried._loss, BrokenSft(SftSpec())
    found = [memory(tried), after(tried, norm_limit=-1.0)[2:]]
    tried._loss = broken
    found.append(after(tried)[2:])
    tried._loss = loss
    return [*found, after(tried), after(calm)]


def overflowing_step(_rank: int) -> list[Any]:
    """Losses, norms and FP8's memory of a step whose gradient overflows fp16 at first, and of the
    same step at the scale at which it did not."""
    from megatron_backend.fp8_emulation import delayed_roundings
    from megatron_backend.training.optimizer import loss_scale, loss_scalers

    batch = random_batch()
    found, scale = [], 2.0**40
    for _ in range(2):
        trainer = trainer_with(
            Fp8Spec(recipe="delayed", amax_history=4), Layout(), dtype=torch.float16
        )
        [scaler] = loss_scalers(trainer.optimizer)
        scaler.load_state_dict({**scaler.state_dict(), "scale": torch.tensor([scale])})
        share = trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
        scale = loss_scale(trainer.optimizer)
        seen = [r.memory for chunk in trainer.model for r in delayed_roundings(chunk)]
        found.append([share.loss, share.gradient_norm, scale, *seen])
    return found


def steps_alone(rank: int, layout: Layout, name: str) -> tuple[list[StepShare], list[StepShare]]:
    """A step that is not taken by all copies, by the first half and by the second; and the same
    once the last rank is broken, in its loss and in the gradient of what it computes of nothing."""
    trainer = build_trainer(name, layout, SftSpec(), num_hidden_layers=2)
    batch = random_batch()
    half = layout.dp // 2

    def alone() -> list[StepShare]:
        return [
            trainer.train_step(
                batch,
                Normalizer.of(batch),
                learning_rate=LEARNING_RATE,
                norm_limit=-1.0,
                copies=copies,
            )
            for copies in (None, range(half), range(half, layout.dp))
        ]

    well = alone()
    if rank == layout.world_size - 1:
        trainer._loss = BrokenSft(SftSpec())
        for chunk in trainer.chunks:
            chunk.register_forward_pre_hook(_break_gradients)
    return well, alone()


def _break_gradients(chunk: Any, _inputs: Any) -> None:
    """Puts a gradient that is no number where the backward pass adds to it."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.grad_data.fill_(math.nan)
