"""Six sequences on which the values of TRL, verl, OpenRLHF and Liger are known.

They are drawn here exactly as they were for the references: numpy RandomState(7), lengths 5, 3, 4,
2, 5, 1. Column 0 of our tensors predicts nothing, so theirs begin at column 1.
"""

import numpy as np
import torch
from torch import Tensor

from algorithms.batch import Batch

ADVANTAGES = [1.3, -0.8, 0.4, -1.7, 0.9, -0.2]
REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0]
"""In two groups of three."""
LENGTHS = [5, 3, 4, 2, 5, 1]


def reference_fixture(dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """The batch, and the policy's log-probs [6, 6] with gradient.

    `values` are a critic's old ones; its new ones are `predicted_values`.
    """
    draw = np.random.RandomState(7)
    old = -draw.uniform(0.2, 3.0, (6, 5))
    new = old + draw.normal(0, 0.35, (6, 5))
    reference = old + draw.normal(0, 0.5, (6, 5))
    values = draw.normal(0, 0.7, (6, 5))
    predicted = values + draw.normal(0, 0.5, (6, 5))
    mask = np.array([[i < n for i in range(5)] for n in LENGTHS], dtype=np.float32)

    def aligned(array: np.ndarray) -> Tensor:
        return torch.nn.functional.pad(torch.tensor(array, dtype=dtype), (1, 0))

    batch = Batch(
        tokens=torch.zeros(6, 6, dtype=torch.int64),
        lengths=torch.tensor(LENGTHS) + 1,
        loss_mask=aligned(mask).float(),
        per_token={
            "old_log_probs": aligned(old),
            "reference_log_probs": aligned(reference),
            "advantages": torch.tensor(ADVANTAGES, dtype=dtype).unsqueeze(1).repeat(1, 6),
            "values": aligned(values),
            "predicted_values": aligned(predicted),
        },
    )
    return batch, aligned(new).requires_grad_()
