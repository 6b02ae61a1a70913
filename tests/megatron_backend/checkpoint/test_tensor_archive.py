import io

import pytest
import torch
from torch import Tensor

from megatron_backend.checkpoint.tensor_archive import write_tensor

TENSORS = {
    "matrix": torch.randn(33, 7),
    "half": torch.randn(5, 3).bfloat16(),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
    "integers": torch.arange(100),
    "truths": torch.tensor([True, False, True]),
    "bytes of FP8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "a view of some columns": torch.randn(8, 8)[:, 2:5],
    "a view of some rows": torch.randn(8, 8)[2:5],
    "a transposed view": torch.randn(3, 5).t(),
    "of a parameter": torch.nn.Parameter(torch.randn(3)).detach(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_it_is_what_torch_writes(name: str) -> None:
    tensor, expected = TENSORS[name], io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor.contiguous().clone(), expected)
    finally:
        torch.serialization.set_crc32_options(True)
    for _ in range(2):  # the first time, and from what is kept
        found = io.BytesIO()
        write_tensor(tensor, found)
        assert found.getvalue() == expected.getvalue()
    assert same(torch.load(io.BytesIO(found.getvalue()), weights_only=True), tensor)


def same(one: Tensor, other: Tensor) -> bool:
    pair = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*pair)


def test_torchs_own_checksums_stay_as_they_were() -> None:
    write_tensor(torch.zeros(17, 3), io.BytesIO())
    assert torch.serialization.get_crc32_options()
