"""RMSNorm for the CPU layer spec.

Megatron's own for the CPU is torch's module, which refuses sequence parallelism: each rank then
sees some of the tokens only, so the gradient of a norm's weight must be summed over the
tensor-parallel ranks, and Megatron does that for parameters that are marked. This one marks them.

torch's is also made of small operations on the CPU. In float32 it is written out here, forward and
backward, with a third of the passes over memory. With r = 1 / sqrt(mean(x^2) + eps):

    y = r x w,   dL/dw = sum r x g,   dL/dx = r (g w) - x r^3 mean(g w x)
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RmsNorm(torch.nn.Module):
    """Root mean square norm (arXiv 1910.07467, equation 4), built as Megatron builds its norms.

    Args:
        config: of the model.
        hidden_size: numbers in each vector.
        eps: added to the mean square.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_same_for_every_norm: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self._one_added = config.layernorm_zero_centered_gamma
        start = torch.zeros if self._one_added else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size], scaled by the weight (by 1 + weight where norms are zero-centred)."""
        if not self._one_added:
            if hidden.dtype == self.weight.dtype == torch.float32:
                normed: Tensor = _RmsNorm.apply(hidden, self.weight, self.eps)
                return normed
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # Gemma multiplies before it rounds to the activations' format.
        scaled = F.rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
        return scaled.type_as(hidden)


class _RmsNorm(torch.autograd.Function):
    """Forward and backward as the module's text says."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        inverse = norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        return torch.mul(hidden, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, inverse = ctx.saved_tensors
        products = (gradient * hidden).flatten(0, -2)
        grad_weight = torch.mv(products.t(), inverse.flatten())
        mean = torch.mv(products, weight).view_as(inverse).div_(hidden.shape[-1])
        grad_hidden = torch.mul(gradient, weight).mul_(inverse)
        grad_hidden.addcmul_(hidden, mean.mul_(inverse.pow(3)), value=-1)
        return grad_hidden, grad_weight, None
