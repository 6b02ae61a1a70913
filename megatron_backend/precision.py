"""From `precision` in a job to Megatron's settings: the one place that knows both sides' names.

Megatron makes Transformer Engine's recipe object of its own settings, at each forward pass
(`megatron.core.fp8_utils.get_fp8_recipe`):

    recipe      Transformer Engine's object   its scales
    delayed     DelayedScaling                from the maxima of past passes
    tensorwise  Float8CurrentScaling          from each tensor as it is
    blockwise   Float8BlockScaling            of 1 x 128 values, of weights of 128 x 128
    mxfp8       MXFP8BlockScaling             of 32 values each, powers of two

Where there is no CUDA nothing of FP8 is told to Megatron: `fp8_emulation` computes the same
products there. The tests hold every name to the installed Megatron's dataclasses, and every recipe
to the object that Transformer Engine gets.
"""

from typing import Any, Literal

import torch

from service.spec import Fp8Spec

Dtype = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def torch_dtype(name: Dtype) -> torch.dtype:
    """The format of weights and activations that `precision.dtype` names."""
    return _DTYPES[name]


def transformer_fields(dtype: torch.dtype, fp8: Fp8Spec | None) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig`.

    Args:
        dtype: of weights and activations.
        fp8: the recipe that Transformer Engine shall use; None for none, or for emulation.
    """
    fields: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }
    if fp8 is None:
        return fields
    return fields | {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_amax_history_len": fp8.amax_history,
        "fp8_amax_compute_algo": fp8.amax_compute,
        "fp8_margin": fp8.margin,
        "fp8_param": fp8.params_in_fp8,
        "first_last_layers_bf16": fp8.first_last_bf16_layers > 0,
        "num_layers_at_start_in_bf16": fp8.first_last_bf16_layers,
        "num_layers_at_end_in_bf16": fp8.first_last_bf16_layers,
    }


def gradient_buffer_fields(fp8: Fp8Spec | None) -> dict[str, Any]:
    """Fields of Megatron's `DistributedDataParallelConfig`."""
    return {"fp8_param_gather": fp8 is not None and fp8.params_in_fp8}


def optimizer_fields(dtype: torch.dtype, fp8: Fp8Spec | None) -> dict[str, Any]:
    """Fields of Megatron's `OptimizerConfig`; fp16 gets its dynamic loss scale there."""
    return {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "fp8_recipe": None if fp8 is None else fp8.recipe,
    }
