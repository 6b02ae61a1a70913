"""The emulation's scales and roundings are Transformer Engine's own, where it has them in torch."""

import pytest
import torch

from megatron_backend.fp8_formats import (
    E4M3,
    E5M2,
    cast,
    delayed_scale,
    largest,
    push_amax,
    tensor_scale,
)


@pytest.mark.parametrize("compute", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (4, 0), (4, 2)])
def test_delayed_scales_follow_the_same_history(compute: str, length: int, margin: int) -> None:
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=compute, margin=margin)
    theirs, scale = torch.zeros(length, 3), torch.ones(3)
    ours, our_scale = theirs.clone(), scale.clone()
    generator = torch.Generator().manual_seed(1)
    special = [0.0, float("inf"), float("nan"), 1e-40]
    for step in range(20):
        newest = 10 ** (4 * torch.randn(3, generator=generator))
        newest[step % 3] = special[step % 4] if step % 2 else newest[step % 3]
        theirs[0], ours[0] = newest, newest
        _amax_and_scale_update(theirs, scale, largest(E4M3), recipe)
        amax, ours = push_amax(ours, compute=compute)  # type: ignore[arg-type]
        our_scale = delayed_scale(amax, our_scale, E4M3, margin=margin)
        assert torch.equal(our_scale, scale), step
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1)), step


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_current_scaling_gives_the_same_numbers(dtype: torch.dtype, size: float) -> None:
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
    )

    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * size
    quantizer = CurrentScalingQuantizerRef(dtype=dtype, rowwise=True, columnwise=True)
    reference = quantizer.quantize(values)
    scale = tensor_scale(values.abs().amax(), dtype)
    assert torch.equal(cast(values, scale, dtype), reference.data.float() / scale)
