"""The batches that both sides compute on: the references in their environment, ours in the tests.

Only numpy is needed here. `RandomState` draws the same numbers in every release of it. Column t of
an array speaks of the t-th token after the prompt, as it does in the references; our own batches
have one column more in front, which nothing predicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

type Array = np.ndarray[Any, np.dtype[np.float64]]

VOCABULARY = 7
GAE = {"gae/1-0.95": (1.0, 0.95), "gae/0.9-0.8": (0.9, 0.8), "gae/1-1": (1.0, 1.0)}
"""Case to discount and lambda."""
KL_SEEN = (9.0, 5.5, 0.1, 6.0, 30.0, 7.0)
"""Nats of an answer that an adaptive coefficient sees, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """B rows of T tokens.

    Attributes:
        name: of the batch.
        mask: [B, T], 1 where a token is trained.
        new, old, reference, rollout: [B, T] log-probs by the trained policy, by itself before the
            update, by the model at the start, and by the generator (exact in float32).
        values, predicted: [B, T] of a critic, before the update and now.
        entropy: [B, T] of the policy, not negative.
        advantages: [B] of whole rows.
        token_advantages: [B, T].
        rewards: [B] of whole rows.
        token_rewards: [B, T], 0 where nothing is trained.
        baselines: [B] rewards of greedy answers.
        scores: [B] by a reward model.
        margins: [B / 2] of pairs.
        desirable: [B] bool.
        student, teacher: [B, T, V] logits.
        group_size: rows of one question, one behind the other.
    """

    name: str
    mask: Array
    new: Array
    old: Array
    reference: Array
    rollout: Array
    values: Array
    predicted: Array
    entropy: Array
    advantages: Array
    token_advantages: Array
    rewards: Array
    token_rewards: Array
    baselines: Array
    scores: Array
    margins: Array
    desirable: Array
    student: Array
    teacher: Array
    group_size: int

    @property
    def trained_rows(self) -> Array:
        """[B] bool: rows with a trained token."""
        rows: Array = self.mask.sum(axis=1) > 0
        return rows

    @property
    def whole_pairs(self) -> Array:
        """[B / 2] bool: pair i is row i, which was chosen, and row i + B / 2."""
        chosen, rejected = np.split(self.trained_rows, 2)
        return chosen & rejected

    def bounded(self, bound: float) -> "Inputs":
        """The same, with no log-ratio of the new policy to the old beyond the bound."""
        return replace(self, new=self.old + np.clip(self.new - self.old, -bound, bound))

    def near_reference(self, bound: float) -> "Inputs":
        """The same, with no log-ratio of the old policy to the reference beyond the bound."""
        kept = np.clip(self.old - self.reference, -bound, bound)
        return replace(self, reference=self.old - kept)

    @property
    def groups(self) -> Array:
        """[B] the number of each row's question."""
        return np.arange(len(self.mask)) // self.group_size


def _drawn(
    name: str,
    seed: int,
    mask: Array,
    *,
    group_size: int,
    advantages: Sequence[float] = (),
    rewards: Sequence[float] = (),
) -> Inputs:
    """The first draws are those of fixture F, in its order."""
    draw, shape = np.random.RandomState(seed), mask.shape
    old = -draw.uniform(0.2, 3.0, shape)
    new = old + draw.normal(0, 0.35, shape)
    reference = old + draw.normal(0, 0.5, shape)
    values = draw.normal(0, 0.7, shape)
    predicted = values + draw.normal(0, 0.5, shape)
    rows = len(mask)
    return Inputs(
        name=name,
        mask=mask,
        new=np.minimum(new, -1e-3) if name != "F" else new,
        old=old,
        reference=reference,
        rollout=(old + draw.normal(0, 0.6, shape)).astype(np.float32).astype(np.float64),
        values=values,
        predicted=predicted,
        entropy=draw.uniform(0.0, 2.0, shape),
        advantages=np.array(advantages) if advantages else draw.normal(0, 1, rows),
        token_advantages=draw.normal(0, 1, shape),
        rewards=np.array(rewards) if rewards else draw.normal(0, 1, rows),
        token_rewards=draw.normal(0, 0.5, shape) * mask,
        baselines=draw.normal(0, 1, rows),
        scores=draw.normal(0, 1.5, rows),
        margins=np.abs(draw.normal(0, 0.5, rows // 2)),
        desirable=draw.uniform(0, 1, rows) < 0.6,
        student=draw.normal(0, 1.5, (*shape, VOCABULARY)),
        teacher=draw.normal(0, 1.5, (*shape, VOCABULARY)),
        group_size=group_size,
    )


def _lengths(lengths: Sequence[int], width: int) -> Array:
    return np.array([[float(t < n) for t in range(width)] for n in lengths])


def _fixture_f() -> Inputs:
    return _drawn(
        "F",
        7,
        _lengths([5, 3, 4, 2, 5, 1], 5),
        group_size=3,
        advantages=[1.3, -0.8, 0.4, -1.7, 0.9, -0.2],
        rewards=[1.0, 0.0, 0.5, 2.0, 2.0, -1.0],
    )


def _ragged() -> Inputs:
    """Two groups of four. The rewards of the first are equal but for rounding."""
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.3, 1.0, 0.0, 0.25, -2.0]
    mask = _lengths([7, 1, 4, 2, 6, 3, 7, 5], 7)
    return _drawn("ragged", 11, mask, group_size=4, rewards=rewards)


def _turns() -> Inputs:
    """Between the policy's tokens stand some that the environment wrote."""
    mask = _lengths([8, 5, 7, 3, 8, 6], 8)
    mask[0, 2:4] = mask[1, 1] = mask[2, 3:6] = mask[4, [0, 5]] = mask[5, 4] = 0.0
    return _drawn("turns", 12, mask, group_size=2)


def _empty_rows() -> Inputs:
    """Of two rows nothing is trained: they failed, or could not be scored."""
    return _drawn("empty-rows", 13, _lengths([6, 4, 0, 3, 2, 0, 5, 1], 6), group_size=2)


def _alone() -> Inputs:
    """Groups of one."""
    return _drawn("alone", 14, _lengths([4, 2, 3, 1], 4), group_size=1)


def _extreme() -> Inputs:
    """Ratios up to e^30 either way, and a row that the policy is nearly sure of."""
    inputs = _drawn(
        "extreme",
        15,
        _lengths([5, 4, 5, 3, 5, 2], 5),
        group_size=3,
        advantages=[1.5, -1.2, 0.7, -0.4, -0.9, 1.1],
    )
    inputs.new[0, :2], inputs.old[0, :2] = [-0.01, -34.0], [-30.01, -4.0]
    inputs.new[1, 1:3], inputs.old[1, 1:3] = [-0.02, -32.0], [-28.0, -1.0]
    inputs.new[2, 4], inputs.old[2, 4] = -0.5, -8.5
    inputs.new[3, 0], inputs.old[3, 0] = -9.0, -0.2
    inputs.new[4, 2], inputs.old[4, 2] = -1.0, -7.5
    inputs.new[5], inputs.old[5] = -1e-5, -2e-5
    inputs.reference[0, 3], inputs.reference[4, 0] = inputs.new[0, 3] - 26.0, -0.3
    inputs.new[4, 0] = -13.0
    inputs.old[4, 0] = -12.5
    return inputs


def _one_token() -> Inputs:
    return _drawn("one-token", 16, _lengths([1, 1, 1, 1], 1), group_size=2)


BATCHES = {
    inputs.name: inputs
    for inputs in (
        _fixture_f(),
        _ragged(),
        _turns(),
        _empty_rows(),
        _alone(),
        _extreme(),
        _one_token(),
    )
}
