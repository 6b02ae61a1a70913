"""Every name that a job's precision is mapped to is a field of the installed Megatron's."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_backend.precision import (
    gradient_buffer_fields,
    optimizer_fields,
    torch_dtype,
    transformer_fields,
)
from service.spec import Fp8Spec
from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks

FP8 = Fp8Spec(
    recipe="delayed",
    format="e4m3",
    amax_history=7,
    amax_compute="most_recent",
    margin=2,
    params_in_fp8=True,
)


def fields_of_megatron(_rank: int) -> dict[str, list[str]]:
    """Names of the fields of each of Megatron's dataclasses."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    return {one.__name__: [field.name for field in dataclasses.fields(one)] for one in classes}


def test_every_mapped_name_is_megatrons(ranks: Ranks) -> None:
    [known] = ranks.run(Layout(), fields_of_megatron)
    mapped: dict[str, dict[str, Any]] = {
        "TransformerConfig": transformer_fields(torch.bfloat16, FP8),
        "DistributedDataParallelConfig": gradient_buffer_fields(FP8),
        "OptimizerConfig": optimizer_fields(torch.bfloat16, FP8),
    }
    for owner, fields in mapped.items():
        assert set(fields) <= set(known[owner]), owner


def test_every_field_of_the_recipe_is_mapped() -> None:
    fields = transformer_fields(torch.bfloat16, FP8)
    assert (fields["fp8"], fields["fp8_recipe"]) == ("e4m3", "delayed")
    assert (fields["fp8_amax_history_len"], fields["fp8_amax_compute_algo"]) == (7, "most_recent")
    assert (fields["fp8_margin"], fields["fp8_param"]) == (2, True)
    assert gradient_buffer_fields(FP8) == {"fp8_param_gather": True}
    assert optimizer_fields(torch.bfloat16, FP8)["fp8_recipe"] == "delayed"
    border = transformer_fields(torch.bfloat16, Fp8Spec(first_last_bf16_layers=3))
    assert border["first_last_layers_bf16"]
    assert (border["num_layers_at_start_in_bf16"], border["num_layers_at_end_in_bf16"]) == (3, 3)
    # Whoever adds a field to the recipe has to say here what becomes of it.
    assert set(Fp8Spec.model_fields) == {
        "recipe",
        "format",
        "amax_history",
        "amax_compute",
        "margin",
        "first_last_bf16_layers",
        "params_in_fp8",
    }


@pytest.mark.parametrize(
    ("name", "dtype", "bf16", "fp16"),
    [
        ("fp32", torch.float32, False, False),
        ("bf16", torch.bfloat16, True, False),
        ("fp16", torch.float16, False, True),
    ],
)
def test_each_dtype(name: Any, dtype: torch.dtype, bf16: bool, fp16: bool) -> None:
    assert torch_dtype(name) == dtype
    for fields in (transformer_fields(dtype, None), optimizer_fields(dtype, None)):
        assert (fields["params_dtype"], fields["bf16"], fields["fp16"]) == (dtype, bf16, fp16)
    assert "fp8" not in transformer_fields(dtype, None)
    assert optimizer_fields(dtype, None)["fp8_recipe"] is None
    assert gradient_buffer_fields(None) == {"fp8_param_gather": False}
