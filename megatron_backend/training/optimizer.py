"""Gradient buffers and Megatron's distributed optimizer around a model."""

import math
from collections.abc import Sequence

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_backend.runtime import cpu
from megatron_backend.training.adam import GroupStepAdam
from service.spec import OptimizerSpec


def wrap(chunk: GPTModel) -> DistributedDataParallel:
    """A chunk of the model with one gradient buffer, summed in fp32 over data-parallel ranks."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
    )
    return DistributedDataParallel(chunk.config, config, chunk)


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], spec: OptimizerSpec, *, dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW over all chunks, its state split over data-parallel ranks, in fp32 whatever they are.

    Biases and norms are not decayed.
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
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return megatron_optimizer.get_megatron_optimizer(config, list(chunks))


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    """Sets the rate of the next step, and the decay of each group (none for biases and norms)."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """L2 norm of the whole gradient, the same on every rank. Call once, after backward."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def take_step(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clips to the configured norm and updates the weights; `norm` is that of `gradient_norm`."""
    limit = optimizer.config.clip_grad
    if limit > 0 and not math.isinf(limit):
        clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm=limit, total_norm=norm)
    optimizer.step_with_ready_grads()


def _use_our_adam() -> None:
    """Puts our Adam where Megatron expects Transformer Engine's or Apex's."""
    megatron_optimizer.Adam = GroupStepAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
