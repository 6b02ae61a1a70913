"""Our batches, made of the inputs that the references were given, in float64."""

import numpy as np
import torch
from torch import Tensor

from algorithms.batch import Batch
from algorithms.samples import Rollout
from tests.parity.batches import Array, Inputs


def aligned(array: Array) -> Tensor:
    """[B, T + 1]: column 0, which nothing predicts, stands before the references' columns."""
    return torch.nn.functional.pad(torch.tensor(array, dtype=torch.float64), (1, 0))


def unaligned(tensor: Tensor | None) -> Array:
    """The references' columns; ours in front must be 0."""
    assert tensor is not None
    assert not tensor[:, 0].any()
    found: Array = tensor[:, 1:].detach().double().numpy()
    return found


def pair_order(inputs: Inputs) -> Array:
    """Their row i is paired with row i + B / 2; ours stand one behind the other."""
    return np.arange(len(inputs.mask)).reshape(2, -1).T.ravel()


def batch_of(inputs: Inputs, *, pairs: bool = False, token_advantages: bool = False) -> Batch:
    """Everything that a loss may read; in pairs, rows are in our order."""
    order = pair_order(inputs) if pairs else np.arange(len(inputs.mask))
    advantages = np.repeat(inputs.advantages[:, None], inputs.mask.shape[1], axis=1)
    per_token = {
        "old_log_probs": inputs.old,
        "reference_log_probs": inputs.reference,
        "rollout_log_probs": inputs.rollout,
        "advantages": inputs.token_advantages if token_advantages else advantages,
        "values": inputs.values,
        # As the references were given them.
        "returns": inputs.token_advantages + inputs.values,
    }
    rows, width = inputs.mask.shape
    per_sequence = {"desirable": torch.tensor(inputs.desirable[order], dtype=torch.float64)}
    if pairs:
        margins = torch.tensor(inputs.margins, dtype=torch.float64)
        per_sequence["margin"] = margins.repeat_interleave(2)
    return Batch(
        tokens=torch.zeros(rows, width + 1, dtype=torch.int64),
        lengths=torch.full((rows,), width + 1),
        loss_mask=aligned(inputs.mask[order]).float(),
        per_token={name: aligned(array[order]) for name, array in per_token.items()},
        per_sequence=per_sequence,
        unit=2 if pairs else 1,
    )


def at_last(inputs: Inputs) -> Array:
    """[B, T]: each row's reward at its last trained token."""
    rewards = np.zeros_like(inputs.mask)
    for row, mask in enumerate(inputs.mask):
        if mask.any():
            rewards[row, mask.nonzero()[0].max()] = inputs.rewards[row]
    return rewards


def rollout_of(inputs: Inputs, rewards: Array, *, group_size: int | None = None) -> Rollout:
    """Rows of which nothing is trained were not scored."""
    return Rollout(
        batch=batch_of(inputs),
        rewards=aligned(rewards),
        scored=torch.tensor(inputs.trained_rows),
        group_size=inputs.group_size if group_size is None else group_size,
        baselines=torch.tensor(inputs.baselines, dtype=torch.float64),
    )
