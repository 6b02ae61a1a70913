"""Each recipe of a job becomes the recipe object of Transformer Engine that it names."""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_backend.precision import transformer_fields
from service.spec import Fp8Spec
from service.spec.padding import fp8_alignment
from service.validation.precision import has_kernels

OBJECTS = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def recipe_of(fp8: Fp8Spec) -> Any:
    """What Megatron gives Transformer Engine."""
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = transformer_fields(torch.bfloat16, fp8)
    return get_fp8_recipe(
        TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **fields)
    )


@pytest.mark.parametrize("number_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("name", list(OBJECTS))
def test_the_recipe_is_made(name: str, number_format: str) -> None:
    from transformer_engine.common import recipe

    made = recipe_of(Fp8Spec.model_validate({"recipe": name, "format": number_format}))
    assert isinstance(made, getattr(recipe, OBJECTS[name]))
    assert made.fp8_format == getattr(recipe.Format, number_format.upper())


def test_delayed_scaling_gets_all_its_settings() -> None:
    made = recipe_of(
        Fp8Spec(recipe="delayed", amax_history=7, amax_compute="most_recent", margin=3)
    )
    assert (made.amax_history_len, made.amax_compute_algo) == (7, "most_recent")
    assert made.margin == 3
    assert made.reduce_amax


def test_blocks_and_scales_are_those_of_the_emulation() -> None:
    made = recipe_of(Fp8Spec(recipe="blockwise"))
    assert (made.x_block_scaling_dim, made.w_block_scaling_dim) == (1, 2)
    assert made.grad_block_scaling_dim == 1
    for parameters in (made.fp8_quant_fwd_inp, made.fp8_quant_fwd_weight, made.fp8_quant_bwd_grad):
        assert parameters.power_2_scale
        assert parameters.amax_epsilon == 0
    assert not recipe_of(Fp8Spec(recipe="mxfp8")).enable_2d_quantization
    assert not recipe_of(Fp8Spec(recipe="tensorwise")).fp8_quant_fwd_inp.power_2_scale


@pytest.mark.parametrize("name", list(OBJECTS))
def test_lengths_are_padded_to_what_the_kernels_take(name: str) -> None:
    from transformer_engine.pytorch.quantization import get_align_size_for_quantization

    fp8 = Fp8Spec.model_validate({"recipe": name})
    assert fp8_alignment(fp8) % get_align_size_for_quantization(recipe_of(fp8)) == 0


@pytest.mark.parametrize("name", list(OBJECTS))
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_is_refused_at_submit_is_what_transformer_engine_refuses(
    name: str, capability: tuple[int, int]
) -> None:
    from transformer_engine.pytorch import quantization

    checks = {
        "delayed": quantization._compute_fp8_support,
        "tensorwise": quantization._compute_fp8_support,
        "blockwise": quantization._compute_fp8_block_scaling_support,
        "mxfp8": quantization._compute_mxfp8_support,
    }
    with mock.patch.object(quantization, "get_device_compute_capability", return_value=capability):
        supported, _ = checks[name]()
    assert supported == has_kernels(name, capability)
