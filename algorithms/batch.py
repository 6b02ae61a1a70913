"""Tensors of one optimizer step, and the sums that metrics are made of.

One convention holds everywhere: index `i` of a per-token tensor speaks of token `i` itself. So
`log_probs[b, i]` is log p(token i | tokens before i), `loss_mask[b, i]` says whether token `i` is
trained, and column 0, which nothing predicts, is always 0. No function shifts anything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences padded on the right. B sequences, T tokens.

    Attributes:
        tokens: [B, T] int64; what stands at and after `lengths` is padding.
        lengths: [B] int64, at least 1.
        loss_mask: [B, T] float32, 1 where the token is trained, else 0.
        per_token: more [B, T] float32 tensors: `old_log_probs`, `reference_log_probs`,
            `rollout_log_probs`.
        per_sequence: more [B] tensors: `advantages`, ...
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, index: Tensor | slice) -> "Batch":
        """The chosen sequences, at the same padded length."""
        return Batch(
            tokens=self.tokens[index],
            lengths=self.lengths[index],
            loss_mask=self.loss_mask[index],
            per_token={name: t[index] for name, t in self.per_token.items()},
            per_sequence={name: t[index] for name, t in self.per_sequence.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """Denominators of a whole optimizer step, over all micro-batches and data-parallel ranks.

    They are counted once, before the batch is split, so that the split changes no gradient.
    """

    tokens: float
    """Trained tokens: the sum of `loss_mask`."""
    sequences: float
    """Sequences with at least one trained token."""

    @classmethod
    def of(cls, batch: Batch) -> "Normalizer":
        """Counts a whole batch. An empty count becomes 1: 0 / 1 is 0, where 0 / 0 is NaN."""
        return cls(
            tokens=max(float(batch.loss_mask.sum()), 1.0),
            sequences=max(float((batch.loss_mask.sum(dim=1) > 0).sum()), 1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutputs:
    """What the model says of a micro-batch's own tokens.

    The temperature is `rollout.temperature` for online algorithms, and 1 for offline ones.

    Attributes:
        log_probs: [B, T] float32, with gradient; 0 where the token is not trained.
        entropy: [B, T] float32 without gradient, of the distribution that token i was drawn from;
            0 where the token is not trained.
    """

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A micro-batch's share of the step's loss.

    Attributes:
        loss: scalar with gradient, already divided by the step's `Normalizer`: the shares of all
            micro-batches and data-parallel ranks add up to the step's loss.
        sums: metric name to (sum, count), both over this micro-batch; see `MetricSums`.
    """

    loss: Tensor
    sums: Mapping[str, tuple[float, float]]


class MetricSums:
    """Means that do not depend on how a batch was split: sums and counts until the very end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Adds the (sum, count) pairs of one micro-batch, rank or step."""
        for name, (total, count) in sums.items():
            old_total, old_count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (old_total + total, old_count + count)

    def sums(self) -> dict[str, tuple[float, float]]:
        """The pairs so far."""
        return dict(self._sums)

    def means(self) -> dict[str, float]:
        """Sum / count of each; a metric with nothing to count is left out, never NaN."""
        return {name: total / count for name, (total, count) in self._sums.items() if count}


def masked_pair(values: Tensor, mask: Tensor) -> tuple[float, float]:
    """(sum, count) of `values` where `mask` is not 0; what is masked may even be NaN."""
    kept = torch.where(mask > 0, values.detach(), 0.0)
    return float(kept.sum()), float((mask > 0).sum())


def pad_rows(
    rows: Iterable[list[float]] | Iterable[list[int]], *, value: float, dtype: torch.dtype
) -> Tensor:
    """[B, T] from ragged rows, padded on the right to the longest."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
