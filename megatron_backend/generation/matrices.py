"""Matrices by which a decoding step multiplies few rows.

A step of few rows is bound by how fast the weights come from memory. BLAS, given a matrix as it
lies, reads it at less than half of that speed; oneDNN, which may lay it out anew first, reads it as
fast as memory gives it. It also adds, multiplies or applies an activation while the product is in
registers. So matrices in fp32 are laid out once for each call of `generate`, at about the cost of
two steps and of a second copy.

The operations are those that torch's own compiler has for CPUs. Where a build of torch lacks them,
and in other formats, the same is done by plain ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from service.spec.model_families import Activation

_ROWS = 16
"""oneDNN chooses a layout for a number of rows. This one is best for all from two on."""
_FUSED = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh")}


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Matrix:
    """A linear map, of rows [N, in] to rows [N, out].

    Attributes:
        shape: [out, in].

    Args:
        weight: [out, in].
        bias: [out].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = weight.shape
        self._bias = bias
        self._packed = weight.dtype == torch.float32 and can_pack()
        self._weight = weight
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)

    def __call__(self, rows: Tensor) -> Tensor:
        """What the rows become."""
        if not self._packed:
            return F.linear(rows, self._weight, self._bias)
        return self._fused(rows, "none")

    def activated(self, rows: Tensor, activation: Activation) -> Tensor:
        """The activation of what the rows become."""
        if self._packed:
            return self._fused(rows, *_FUSED[activation])
        product = self(rows)
        return F.silu(product) if activation == "silu" else F.gelu(product, approximate="tanh")

    def times(self, rows: Tensor, factor: Tensor) -> Tensor:
        """What the rows become, times `factor` [N, out]."""
        return self._combined(rows, factor, "mul") if self._packed else self(rows).mul_(factor)

    def plus(self, rows: Tensor, base: Tensor) -> Tensor:
        """What the rows become, plus `base` [N, out]."""
        return self._combined(rows, base, "add") if self._packed else self(rows).add_(base)

    def _fused(self, rows: Tensor, name: str, variant: str = "") -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, name, [], variant
        )
        return product

    def _combined(self, rows: Tensor, other: Tensor, name: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, other, self._weight, self._bias, name
        )
        return product
