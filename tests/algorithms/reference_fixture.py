"""Six sequences on which the values of TRL, verl, OpenRLHF and Liger are known.

They are drawn here exactly as they were for the references: numpy RandomState(7), lengths 5, 3, 4,
2, 5, 1. Column 0 of our tensors predicts nothing, so theirs begin at column 1.
"""

from dataclasses import replace

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


MARGINS = [0.5, 0.1, 0.0]
SCORES = [1.1, 0.5, -0.2, 0.3, 1.3, -1.1]
"""Chosen, rejected, chosen, ... of the reward-model values. Only their differences 0.6, -0.5, 2.4
and the sum of the squares of their sums, 2.61, follow from those values."""
DESIRABLE = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
"""The labels of the KTO values, for the rows in the order of `reference_fixture`."""
KTO_REFERENCE_POINT = 0.0783714


def pair_fixture(dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """The same sequences as three pairs. The references pair rows i and i + 3; here they lie one
    behind the other, as `Batch.unit` wants it: rows 0, 3, 1, 4, 2, 5."""
    batch, log_probs = reference_fixture(dtype)
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    return replace(batch.rows(order), unit=2), log_probs.detach()[order].requires_grad_()


def label_fixture(dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """The same sequences as six answers with labels, and the reference point of the KTO values."""
    batch, log_probs = reference_fixture(dtype)
    labels = {
        "desirable": torch.tensor(DESIRABLE, dtype=dtype),
        "reference_point": torch.full((6,), KTO_REFERENCE_POINT, dtype=dtype),
    }
    return batch.with_per_sequence(**labels), log_probs
