"""Tensors of one optimizer step, and the sums that metrics are made of.

One convention holds everywhere: index `i` of a per-token tensor speaks of token `i` itself. So
`log_probs[b, i]` is log p(token i | tokens before i), `loss_mask[b, i]` says whether token `i` is
trained, and column 0, which nothing predicts, is always 0. No function shifts anything.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
            `rollout_log_probs`, `advantages`, `values`, `returns`.
        per_sequence: more [B] tensors: `margin`, `desirable`, ...
        candidates: [B, T, K] tensors: for each token, others that might stand in its place.
            `candidate_ids` int64 names them, and the model then says their log-probs too
            (`PolicyOutputs.candidate_log_probs`); others are float32.
        unit: so many rows, one behind the other, are read together by the loss (2: an answer that
            was chosen, and the one that was rejected). No micro-batch takes them apart.
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)
    candidates: Mapping[str, Tensor] = field(default_factory=dict)
    unit: int = 1

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
            candidates={name: t[index] for name, t in self.candidates.items()},
            unit=self.unit,
        )

    def masked(self, kept: Tensor) -> "Batch":
        """The same batch, with no token trained of rows that `kept` [B] is False of."""
        return replace(self, loss_mask=self.loss_mask * kept.float().unsqueeze(1))

    def with_per_token(self, **tensors: Tensor) -> "Batch":
        """The same batch with more [B, T] tensors."""
        return replace(self, per_token={**self.per_token, **tensors})

    def with_per_sequence(self, **tensors: Tensor) -> "Batch":
        """The same batch with more [B] tensors."""
        return replace(self, per_sequence={**self.per_sequence, **tensors})


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """Denominators of a whole optimizer step, over all micro-batches and data-parallel ranks.

    They are counted once, before the batch is split, so that the split changes no gradient.
    """

    tokens: float
    """Trained tokens: the sum of `loss_mask`."""
    sequences: float
    """Sequences with at least one trained token."""
    units: float = 1.0
    """Units (see `Batch.unit`) all of whose rows have a trained token."""

    @classmethod
    def of(cls, batch: Batch) -> "Normalizer":
        """Counts a whole batch. An empty count becomes 1: 0 / 1 is 0, where 0 / 0 is NaN."""
        return cls.of_all([batch])

    @classmethod
    def of_all(cls, batches: Sequence[Batch]) -> "Normalizer":
        """Counts several batches as if they were one."""
        trained = [batch.loss_mask.sum(dim=1) > 0 for batch in batches]
        whole = [rows.view(-1, b.unit).all(dim=1) for rows, b in zip(trained, batches, strict=True)]
        return cls(
            tokens=max(math.fsum(float(batch.loss_mask.sum()) for batch in batches), 1.0),
            sequences=max(float(sum(int(rows.sum()) for rows in trained)), 1.0),
            units=max(float(sum(int(units.sum()) for units in whole)), 1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutputs:
    """What the model says of a micro-batch's own tokens.

    The temperature is `rollout.temperature` for online algorithms, and 1 for offline ones.

    Attributes:
        log_probs: [B, T] float32, with gradient; 0 where the token is not trained.
        entropy: [B, T] float32, with gradient, of the distribution that token i was drawn from; 0
            where the token is not trained.
        candidate_log_probs: [B, T, K] float32, with gradient, of the batch's `candidate_ids`; 0
            where the token is not trained. None where the batch has none.
    """

    log_probs: Tensor
    entropy: Tensor
    candidate_log_probs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOutputs:
    """What a model with a value head says of a micro-batch's own tokens.

    Attributes:
        values: [B, T] float32, with gradient. `values[b, i]` is computed from tokens 0 to i - 1,
            as is the distribution that token i is drawn from: it is the value of the state before
            token i. 0 where the token is not trained.
        scores: [B] float32, with gradient: read from a sequence's last token, all of it seen.
    """

    values: Tensor
    scores: Tensor


type Outputs = PolicyOutputs | ValueOutputs
"""By the spec's `head`."""


def policy_outputs(outputs: Outputs) -> PolicyOutputs:
    """What a model that predicts tokens said.

    Raises:
        TypeError: it is one with a value head.
    """
    if not isinstance(outputs, PolicyOutputs):
        raise TypeError("a loss on log-probs was given a value model's outputs")
    return outputs


def value_outputs(outputs: Outputs) -> ValueOutputs:
    """What a model with a value head said.

    Raises:
        TypeError: it is one that predicts tokens.
    """
    if not isinstance(outputs, ValueOutputs):
        raise TypeError("a loss on values was given the outputs of a model that predicts tokens")
    return outputs


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
