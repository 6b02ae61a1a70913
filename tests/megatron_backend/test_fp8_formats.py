"""8-bit numbers and scales against values that were worked out by hand, and against plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_backend.fp8_formats import (
    E4M3,
    E5M2,
    Blocks,
    block_scale,
    cast,
    cast_blocks,
    delayed_scale,
    mx_scale,
    push_amax,
    tensor_scale,
)

ONE = torch.ones(())


def rounded(value: float, *, mantissa_bits: int, least_exponent: int, limit: float) -> float:
    """The nearest number of a format, ties to even: what IEEE 754 says, in integers."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, least_exponent)
    step = math.ldexp(1.0, exponent - mantissa_bits)
    return math.copysign(min(round(abs(value) / step) * step, limit), value)


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e6, 1e6, width=32))
def test_a_cast_rounds_to_the_nearest_number_of_the_format(value: float) -> None:
    tensor = torch.tensor(value)
    e4m3 = rounded(value, mantissa_bits=3, least_exponent=-6, limit=448.0)
    e5m2 = rounded(value, mantissa_bits=2, least_exponent=-14, limit=57344.0)
    assert cast(tensor, ONE, E4M3).item() == e4m3
    assert cast(tensor, ONE, E5M2).item() == e5m2


def test_a_tensor_goes_to_the_largest_number_and_back() -> None:
    values = torch.tensor([0.03, -0.25, 1.75, 0.0])
    scale = tensor_scale(values.abs().amax(), E4M3)
    assert scale.item() == 256.0
    # 0.03 * 256 = 7.68, between 7.5 and 8 of E4M3; -64 and 448 are numbers of it.
    assert cast(values, scale, E4M3).tolist() == [7.5 / 256, -0.25, 1.75, 0.0]
    assert tensor_scale(torch.tensor(2.0), E5M2).item() == 28672.0


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_an_amax_that_says_nothing_changes_no_scale(amax: float) -> None:
    assert tensor_scale(torch.tensor(amax), E4M3).item() == 1.0
    previous = torch.tensor(3.0)
    assert delayed_scale(torch.tensor(amax), previous, E4M3, margin=0).item() == 3.0


def test_a_tiny_amax_gives_a_finite_scale() -> None:
    largest = torch.finfo(torch.float32).max
    assert tensor_scale(torch.tensor(1e-40), E4M3).item() == largest
    assert delayed_scale(torch.tensor(1e-40), ONE, E4M3, margin=0).item() == largest


def test_a_margin_halves_the_scale() -> None:
    amax = torch.tensor(4.0)
    assert [delayed_scale(amax, ONE, E4M3, margin=m).item() for m in (0, 1, 3)] == [112, 56, 14]


def test_a_history_forgets_after_its_length() -> None:
    history = torch.zeros(3, 1)
    seen = []
    for newest in (5.0, 1.0, 2.0, 3.0, 0.5):
        history[0] = newest
        amax, history = push_amax(history, compute="max")
        seen.append(amax.item())
    assert seen == [5.0, 5.0, 5.0, 3.0, 3.0]
    history[0] = 0.25
    assert push_amax(history, compute="most_recent")[0].item() == 0.25


def test_a_history_of_one_is_the_newest() -> None:
    amax, following = push_amax(torch.tensor([[7.0]]), compute="max")
    assert (amax.item(), following.item()) == (7.0, 0.0)


@pytest.mark.parametrize(
    ("amax", "scale"), [(448.0, 1.0), (449.0, 0.5), (447.0, 1.0), (1.0, 256.0), (0.0, 1.0)]
)
def test_scales_of_blocks_are_powers_of_two_rounded_down(amax: float, scale: float) -> None:
    assert block_scale(torch.tensor(amax), E4M3).item() == scale


@pytest.mark.parametrize(
    ("amax", "exponent"), [(448.0, 0), (449.0, 1), (224.0, -1), (225.0, 0), (1.0, -8), (0.0, -127)]
)
def test_mx_scales_are_powers_of_two_that_fit_eight_bits(amax: float, exponent: int) -> None:
    assert mx_scale(torch.tensor(amax), E4M3).item() == 2.0**-exponent


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_no_block_overflows_or_wastes_more_than_a_bit(amax: float) -> None:
    for scale in (block_scale(torch.tensor(amax), E5M2), mx_scale(torch.tensor(amax), E5M2)):
        reached = amax * scale.item()
        assert 57344 / 2 * (1 - 1e-6) <= reached <= 57344 * (1 + 1e-6)
        assert math.frexp(scale.item())[0] == 0.5


def block_by_block(values: Tensor, blocks: Blocks, *, over: int, mx: bool) -> Tensor:
    """Blocks one after another, each cast by itself."""
    result = torch.empty_like(values)
    steps = (blocks.across, blocks.along) if over == 1 else (blocks.along, blocks.across)
    for row in range(0, values.shape[0], steps[0]):
        for column in range(0, values.shape[1], steps[1]):
            place = (slice(row, row + steps[0]), slice(column, column + steps[1]))
            amax = values[place].abs().amax()
            scale = mx_scale(amax, E4M3) if mx else block_scale(amax, E4M3)
            result[place] = cast(values[place], scale, E4M3)
    return result


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize(
    ("blocks", "mx"), [(Blocks(8), False), (Blocks(8, 8), False), (Blocks(4), True)]
)
def test_blocks_share_scales_and_nothing_else(blocks: Blocks, mx: bool, over: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(20, 27, generator=generator) * torch.logspace(-3, 3, 27)
    result = cast_blocks(values, E4M3, over=over, blocks=blocks, mx=mx)
    assert torch.equal(result, block_by_block(values, blocks, over=over, mx=mx))
    error = ((result - values).abs() / values.abs()).amax()
    assert 0 < error < 1  # 8 bits were used, and every number is about what it was


def test_rows_and_columns_of_one_matrix_have_different_forms() -> None:
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    values *= torch.logspace(-4, 4, 8)  # scales are powers of two: only the range tells them apart
    forms = [cast_blocks(values, E4M3, over=over, blocks=Blocks(8)) for over in (0, 1)]
    assert not torch.equal(*forms)
