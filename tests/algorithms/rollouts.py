"""Rollouts written out by hand."""

from collections.abc import Sequence

import torch

from algorithms.batch import Batch, pad_rows
from algorithms.samples import Rollout


def rollout_of(
    rewards: Sequence[Sequence[float] | None],
    *,
    mask: Sequence[Sequence[int]] | None = None,
    group_size: int = 1,
    baselines: Sequence[float] | None = None,
    **per_token: Sequence[Sequence[float]],
) -> Rollout:
    """Rows of a prompt's token and then one policy token for each reward.

    Args:
        rewards: of each token after the prompt; a row of None was not scored.
        mask: which of these the policy wrote; all where None. Of a row that was not scored nothing
            is trained.
        group_size: so many rows answer one question.
        baselines: of each row's question.
        per_token: more tensors, of each token after the prompt.
    """
    lengths = [len(row) if row is not None else 1 for row in rewards]
    written = mask or [[1] * length for length in lengths]
    trained = [
        row if reward is not None else [0] * len(row)
        for row, reward in zip(written, rewards, strict=True)
    ]

    def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return pad_rows([[0.0, *row] for row in rows], value=0.0, dtype=torch.float64)

    batch = Batch(
        tokens=torch.zeros(len(rewards), 1 + max(lengths), dtype=torch.int64),
        lengths=torch.tensor(lengths) + 1,
        loss_mask=padded(trained).float(),
        per_token={name: padded(rows) for name, rows in per_token.items()},
    )
    return Rollout(
        batch=batch,
        rewards=padded([row or [0.0] for row in rewards]),
        scored=torch.tensor([row is not None for row in rewards]),
        group_size=group_size,
        baselines=None if baselines is None else torch.tensor(baselines, dtype=torch.float64),
    )
