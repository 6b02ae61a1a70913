"""Products by oneDNN's packed matrices, and what stands in for them, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_backend.generation import matrices
from megatron_backend.generation.matrices import Matrix, can_pack

ROWS = [1, 2, 16, 300]


@pytest.fixture(params=["packed", "plain"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, where this torch has both."""
    if request.param == "plain":
        monkeypatch.setattr(matrices, "can_pack", lambda: False)
    elif not can_pack():
        pytest.skip("this torch was built without oneDNN")


def tensors(rows: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [N, 48], half of a larger weight [2 * 80, 48], and something to combine with [N, 80]."""
    torch.manual_seed(rows)
    weight = torch.randn(160, 48, dtype=dtype).chunk(2)[1]
    return torch.randn(rows, 48, dtype=dtype), weight, torch.randn(rows, 80, dtype=dtype)


def assert_equal(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("count", ROWS)
def test_products_and_what_is_fused_with_them(count: int) -> None:
    rows, weight, other = tensors(count)
    before = other.clone()
    exact = rows.double() @ weight.double().T
    matrix = Matrix(weight)
    assert matrix.shape == (80, 48)
    assert_equal(matrix(rows), exact)
    assert_equal(matrix.times(rows, other), exact * other.double())
    assert_equal(matrix.plus(rows, other), exact + other.double())
    assert_equal(matrix.activated(rows, "silu"), F.silu(exact))
    assert_equal(matrix.activated(rows, "gelu_pytorch_tanh"), F.gelu(exact, approximate="tanh"))
    assert torch.equal(other, before)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("count", ROWS)
def test_a_bias_is_part_of_each_of_them(count: int) -> None:
    rows, weight, other = tensors(count)
    bias = torch.randn(80)
    exact = rows.double() @ weight.double().T + bias.double()
    matrix = Matrix(weight, bias)
    assert_equal(matrix(rows), exact)
    assert_equal(matrix.times(rows, other), exact * other.double())
    assert_equal(matrix.plus(rows, other), exact + other.double())
    assert_equal(matrix.activated(rows, "silu"), F.silu(exact))


def test_a_later_change_of_the_weights_does_not_reach_a_packed_matrix() -> None:
    """Hence matrices are made anew for each call of `generate`."""
    if not can_pack():
        pytest.skip("this torch was built without oneDNN")
    rows, weight, _ = tensors(3)
    matrix = Matrix(weight)
    before = matrix(rows)
    weight.zero_()
    assert torch.equal(matrix(rows), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_formats_are_multiplied_as_torch_does(dtype: torch.dtype) -> None:
    rows, weight, other = tensors(16, dtype=dtype)
    product = F.linear(rows, weight)
    matrix = Matrix(weight)
    assert torch.equal(matrix(rows), product)
    assert torch.equal(matrix.times(rows, other), product * other)
    assert torch.equal(matrix.plus(rows, other), product + other)
    assert torch.equal(matrix.activated(rows, "silu"), F.silu(product))
