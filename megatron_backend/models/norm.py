"""RMSNorm for the CPU layer spec.

Megatron's own for the CPU is torch's module, which refuses sequence parallelism: each rank then
sees some of the tokens only, so the gradient of a norm's weight must be summed over the
tensor-parallel ranks, and Megatron does that for parameters that are marked. This one marks them.
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
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # Gemma multiplies before it rounds to the activations' format.
        scaled = F.rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
        return scaled.type_as(hidden)
