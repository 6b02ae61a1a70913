"""A batch for ranks that are called without a loop."""

import torch

from algorithms.batch import Batch


def batch(rows: int = 6, length: int = 8) -> Batch:
    """Random tokens, of which all but the first are trained."""
    tokens = torch.randint(15, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(rows, length)
    mask[:, 0] = 0.0
    return Batch(tokens=tokens, lengths=torch.full((rows,), length), loss_mask=mask)
