"""Numbers of 8 bits: how Transformer Engine scales a tensor into them, and what comes back.

An 8-bit number has little range, so a tensor is multiplied by a scale before it is rounded, and
divided by it afterwards. Recipes differ in who shares a scale:

- `delayed`, `tensorwise`: the whole tensor. The largest value goes to the largest number there is.
- `blockwise`: 128 values in a row, or 128 x 128 for weights. Scales are powers of two, rounded
  down, so that nothing overflows and scaling itself loses nothing.
- `mxfp8`: 32 values in a row; scales are powers of two that fit 8 bits (E8M0).

"In a row" is along the dimension that a matrix product sums over, so one matrix has two different
8-bit forms: one for a product over its columns, one over its rows (`over`).

All functions here compute in fp32, are pure, and give the values that an 8-bit product would see.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Blocks:
    """Shape of what shares a scale: along the summed dimension, and across it."""

    along: int
    across: int = 1


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of an 8-bit format: 448 of E4M3, 57344 of E5M2."""
    return torch.finfo(dtype).max


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values after rounding to 8 bits; what is beyond the largest number becomes that number."""
    limit = largest(dtype)
    rounded = (values.float() * scale).clamp(-limit, limit).to(dtype).float()
    return rounded / scale


def tensor_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that takes `amax` to the largest number; 1 where that says nothing.

    Transformer Engine's current scaling: an amax of zero, infinity or NaN gives 1, and one that is
    so small that its scale overflows gives fp32's largest number.
    """
    scale = torch.where(torch.isfinite(amax) & (amax > 0), largest(dtype) / amax, 1.0)
    return scale.clamp(max=_FP32_MAX)


def delayed_scale(amax: Tensor, previous: Tensor, dtype: torch.dtype, *, margin: int) -> Tensor:
    """The scale of delayed scaling; the previous one where `amax` says nothing."""
    scale = largest(dtype) / amax / 2**margin
    scale = torch.where(torch.isfinite(amax) & (amax > 0), scale, previous)
    return scale.clamp(max=_FP32_MAX)


def push_amax(history: Tensor, *, compute: Literal["max", "most_recent"]) -> tuple[Tensor, Tensor]:
    """The amax that a history says, and the history with room for the next one.

    Args:
        history: [length, ...]; row 0 is the newest, the others are in no order.
        compute: the largest of all, or the newest.
    """
    amax = history.amax(0) if compute == "max" else history[0].clone()
    following = torch.roll(history, -1, 0)
    following[0] = 0.0
    return amax, following


def block_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two that take each block's amax close to the largest number, never beyond it."""
    scale = tensor_scale(amax, dtype)
    # Of a float's bits, all but sign and exponent are dropped: rounding down to a power of two.
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def mx_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of an E8M0 number: the least power of two from amax / largest on."""
    inverse = amax * torch.tensor(1.0 / largest(dtype), dtype=torch.float32)
    mantissa, exponent = torch.frexp(inverse)
    # frexp's mantissa is in [1/2, 1): exactly 1/2 is a power of two already.
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    exponent = torch.where(inverse > 0, exponent, torch.full_like(exponent, -127))
    return torch.ldexp(torch.ones_like(amax), -exponent)


def cast_blocks(
    values: Tensor, dtype: torch.dtype, *, over: int, blocks: Blocks, mx: bool = False
) -> Tensor:
    """A matrix after rounding to 8 bits with a scale for each block.

    Args:
        values: [rows, columns].
        dtype: the 8-bit format.
        over: the dimension that the product sums over, 0 or 1.
        blocks: sizes; the last block of a dimension may be smaller.
        mx: scales in E8M0 instead of fp32.
    """
    if over == 0:
        return cast_blocks(values.t(), dtype, over=1, blocks=blocks, mx=mx).t()
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % blocks.along, 0, -rows % blocks.across))
    tiles = padded.unflatten(1, (-1, blocks.along)).unflatten(0, (-1, blocks.across))
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = mx_scale(amax, dtype) if mx else block_scale(amax, dtype)
    return cast(tiles, scale, dtype).flatten(2, 3).flatten(0, 1)[:rows, :columns]
