"""From logits to tokens and their log-probs, with the vocabulary split over ranks.

A draw inverts the cumulative distribution at one uniform number: the first token whose cumulative
mass exceeds `uniform * total`. The order of tokens is that of the whole vocabulary, so the same
number gives the same token however the vocabulary is split. No rank ever holds another's logits:
the ranks exchange their largest logit and their mass, then the one that the draw falls on tells the
others the token. All ranks decide from the same gathered numbers, so they agree.

Rows are wide, and torch's own argmax and cumulative sum look at one number after another. So both
look at blocks of columns first, and then into one block of each row.

The log-prob comes from the same logits, after temperature and with padded vocabulary at -inf; the
trainer's is log softmax(logits / temperature), which is the same number.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Columns of a block, where the vocabulary divides by it.
_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """A rank's part of the vocabulary.

    Attributes:
        start: id of its first column.
        real: how many of its columns are tokens; the others, which come last, are padding.
        group: the tensor-parallel group; None where there is one rank.
    """

    start: int
    real: int
    group: dist.ProcessGroup | None


def sample(
    logits: Tensor, *, temperature: float, uniforms: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """Draws one token a row, at random.

    Args:
        logits: [B, vocabulary / tp].
        temperature: above 0.
        uniforms: [B] float64 in (0, 1), the same on all ranks.
        shard: this rank's part of the vocabulary.

    Returns:
        [B] int64 tokens and [B] float32 log-probs at `temperature`.

    Raises:
        FloatingPointError: a row of logits holds NaN or infinity.
    """
    scaled = _without_padding(logits, shard)
    if temperature != 1:
        scaled = scaled / temperature
    peak = _finite_peak(scaled.amax(dim=-1))
    blocks = _blocks((scaled - peak[:, None]).exp_())
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    if shard.group is None:
        total = _checked(ends[:, -1])
        column = _column_above(blocks, ends, uniforms * total)
        return column, _log_prob(_at(scaled, column), peak, total)

    peaks, masses = _gather(torch.stack([peak.double(), ends[:, -1]]), shard.group).unbind(1)
    highest = peaks.amax(0)
    shares = masses * (peaks - highest).exp()
    bounds = shares.cumsum(0)
    total = _checked(bounds[-1])
    target = uniforms * total
    rank = shard.group.rank()
    owner = (bounds <= target).sum(0).clamp(max=len(bounds) - 1)
    within = (target - (bounds - shares)[rank]) * (highest - peaks[rank]).exp()
    column = _column_above(blocks, ends, within)
    answer = torch.stack([(column + shard.start).double(), _at(scaled, column).double()])
    answer[:, owner != rank] = 0
    dist.all_reduce(answer, group=shard.group)
    return answer[0].long(), _log_prob(answer[1], highest, total)


def greedy(logits: Tensor, *, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Takes the likeliest token of each row, the lowest id among equals.

    Args:
        logits: [B, vocabulary / tp].
        shard: this rank's part of the vocabulary.

    Returns:
        [B] int64 tokens and [B] float32 log-probs at temperature 1.

    Raises:
        FloatingPointError: a row of logits holds NaN or infinity.
    """
    real = _without_padding(logits, shard)
    largest, column = _first_largest(real)
    if shard.group is None:
        return column, _checked(_at(real.log_softmax(-1), column))

    peak = _finite_peak(largest)
    mass = (real - peak[:, None]).exp_().sum(-1).double()
    local = torch.stack([peak.double(), (column + shard.start).double(), mass])
    peaks, tokens, masses = _gather(local, shard.group).unbind(1)
    highest, owner = peaks.max(dim=0)
    total = _checked((masses * (peaks - highest).exp()).sum(0))
    return _at(tokens.T, owner).long(), _log_prob(highest, highest, total)


def _without_padding(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """[B, columns] float32 with padded vocabulary at -inf."""
    logits = logits.float()
    if shard.real < logits.shape[1]:
        logits[:, shard.real :] = -torch.inf
    return logits


def _finite_peak(largest: Tensor) -> Tensor:
    """The largest logit to subtract; on a rank that holds padding only it is -inf, and -inf minus
    -inf would be NaN where it has to be a mass of 0."""
    return largest.clamp(min=torch.finfo(largest.dtype).min)


def _checked(of_rows: Tensor) -> Tensor:
    """What is finite only where all of a row's logits are."""
    if not bool(torch.isfinite(of_rows).all()):
        raise FloatingPointError(
            "the model's logits are not finite, so nothing can be sampled: its weights have "
            "diverged (lower the learning rate), or were never loaded"
        )
    return of_rows


def _blocks(values: Tensor) -> Tensor:
    """[B, blocks, columns of a block], a view."""
    return values.unflatten(1, (-1, math.gcd(values.shape[1], _BLOCK)))


def _block(blocks: Tensor, which: Tensor) -> Tensor:
    """[B, columns of a block]: one block of each row."""
    return blocks.gather(1, which[:, None, None].expand(-1, 1, blocks.shape[2]))[:, 0]


def _first_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """[B] largest of each row, and [B] the first column that has it."""
    blocks = _blocks(values)
    peaks = blocks.amax(-1)
    which = peaks.argmax(-1)
    inside = _block(blocks, which).argmax(-1)
    return _at(peaks, which), which * blocks.shape[2] + inside


def _column_above(blocks: Tensor, ends: Tensor, target: Tensor) -> Tensor:
    """[B] first column at whose end the cumulative mass exceeds the target.

    Args:
        blocks: [B, blocks, columns of a block] mass.
        ends: [B, blocks] float64, cumulative mass at each block's end.
        target: [B] float64.
    """
    which = _first_above(ends, target)
    before = _at(F.pad(ends, (1, 0)), which)
    inside = _block(blocks, which).cumsum(-1, dtype=torch.float64)
    return which * blocks.shape[2] + _first_above(inside, target - before)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[B] first column whose cumulative mass exceeds the target; it has mass of its own."""
    below_all = torch.minimum(target, cumulative[:, -1] * (1 - 2.0**-50))
    return torch.searchsorted(cumulative, below_all[:, None], right=True)[:, 0].clamp_(
        max=cumulative.shape[1] - 1
    )


def _at(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(1, columns[:, None])[:, 0]


def _log_prob(logit: Tensor, peak: Tensor, total: Tensor) -> Tensor:
    return (logit - peak - total.log()).float()


def _gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, *local.shape]."""
    shares = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shares, local, group=group)
    return torch.stack(shares)
