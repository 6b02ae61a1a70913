"""Gradient buffers and Megatron's distributed optimizer around a model."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import MegatronGradScaler

from megatron_backend.precision import gradient_buffer_fields, optimizer_fields
from megatron_backend.runtime import cpu
from megatron_backend.training.adam import GroupStepAdam
from service.spec import Fp8Spec, OptimizerSpec

FP16_SCALE = 2.0**16
"""What an fp16 job multiplies its loss by at the start, so that small gradients do not vanish."""

# Moments and fp32 weights stay in the machine's memory, and are updated there.
_OFFLOAD: dict[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
}


def wrap(chunk: GPTModel, *, fp8: Fp8Spec | None = None) -> DistributedDataParallel:
    """A chunk of the model with one gradient buffer, summed in fp32 over data-parallel ranks."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        **gradient_buffer_fields(None if cpu.active() else fp8),
    )
    return DistributedDataParallel(chunk.config, config, chunk)


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    spec: OptimizerSpec,
    *,
    dtype: torch.dtype,
    fp8: Fp8Spec | None = None,
) -> MegatronOptimizer:
    """AdamW over all chunks, its state split over data-parallel ranks, in fp32 whatever they are.

    Biases and norms are not decayed. With fp16 the loss is scaled (see `FP16_SCALE`).
    """
    if cpu.active():
        _use_our_adam()
    config = OptimizerConfig(
        optimizer="adam",
        lr=spec.learning_rate,
        min_lr=0.0,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.epsilon,
        clip_grad=spec.clip_grad,
        initial_loss_scale=FP16_SCALE,
        min_loss_scale=1.0,
        hysteresis=1,
        use_distributed_optimizer=True,
        **optimizer_fields(dtype, None if cpu.active() else fp8),
        **(_OFFLOAD if spec.offload and not cpu.active() else {}),
    )
    return megatron_optimizer.get_megatron_optimizer(config, list(chunks))


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    """Sets the rate of the next step, and the decay of each group (none for biases and norms)."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """L2 norm of the whole gradient, the same on every rank. Call once, after backward.

    With fp16 it also moves the loss scale: down where the gradient overflowed (the norm is then not
    finite), and up after many steps in which it did not.
    """
    optimizer.prepare_grads()
    _agree_on_scale(optimizer)
    return float(optimizer.get_grad_norm())


def loss_scale(optimizer: MegatronOptimizer) -> float:
    """What losses are multiplied by before the backward pass; 1 but for fp16."""
    return float(optimizer.get_loss_scale())


def loss_scalers(optimizer: MegatronOptimizer) -> list[MegatronGradScaler]:
    """Megatron's, with fp16; experts have one of their own."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    scalers = (getattr(part, "grad_scaler", None) for part in parts)
    return [scaler for scaler in scalers if scaler is not None]


def take_step(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clips to the configured norm and updates the weights; `norm` is that of `gradient_norm`."""
    config = optimizer.config
    if config.clip_grad > 0 and not math.isinf(config.clip_grad):
        clip_grad_by_total_norm_fp32(
            optimizer.get_parameters(),
            max_norm=config.clip_grad,
            total_norm=norm,
            use_decoupled_grad=config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
        )
    optimizer.step_with_ready_grads()


def _agree_on_scale(optimizer: MegatronOptimizer) -> None:
    """Experts have an optimizer of their own, and so a scale; the smaller one holds for both."""
    scalers = loss_scalers(optimizer)
    if len(scalers) > 1:
        smallest = min(scalers, key=lambda scaler: float(scaler.scale)).state_dict()
        for scaler in scalers:
            scaler.load_state_dict(smallest)


def _use_our_adam() -> None:
    """Puts our Adam where Megatron expects Transformer Engine's or Apex's."""
    megatron_optimizer.Adam = GroupStepAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
