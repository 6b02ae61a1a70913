"""A step's rows in micro-batches, the same number on every rank.

Ranks that share experts or a pipeline call the same collectives, so they must run equally many
micro-batches, and agree on it without asking. So one pure function, the same on every rank, plans
for all of them from the lengths of the whole batch. It balances tokens: over the ranks, over each
rank's micro-batches, and between the ranks that run one micro-batch at the same time. Where there
are more micro-batches than rows, the rest have none: they take part in every collective, and add
nothing. The sum over a step's rows does not depend on their order.

Rows that a loss reads together (`Batch.unit`) are planned as one: what is dealt, balanced and cut
here are units, and each is written out as its rows at the end.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.batch import Batch
from megatron_backend.training.sequence import Cut, Stream, lay_out
from service.spec.layout import Layout

type Plan = list[list[list[int]]]
"""The rows of each micro-batch of each data-parallel rank."""

# Padded tokens that another pass must save. It costs as much beside its arithmetic, on a small
# model.
_SAVING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a micro-batch may hold.

    Attributes:
        tokens: at most; a single longer unit goes alone.
        rows: exactly so many, whatever their tokens, or the whole units among so many, and one at
            least; None lets tokens decide.
        least: micro-batches of a rank at least, where there are units enough.
        multiple: their number is a multiple of it.
    """

    tokens: int = 16384
    rows: int | None = None
    least: int = 1
    multiple: int = 1

    @classmethod
    def of(cls, layout: Layout, *, tokens: int, rows: int | None) -> "Limits":
        """What `layout` adds: a pipeline overlaps its stages from twice as many micro-batches on,
        and with virtual stages runs them in rounds of as many."""
        return cls(
            tokens=tokens,
            rows=rows,
            least=2 * layout.pp if layout.pp > 1 else 1,
            multiple=layout.pp if layout.vpp > 1 else 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch, and where their tokens stand in the model.

    Attributes:
        batch: the rows, perhaps none, cut to the longest of them.
        rows: where in the whole batch they are.
        stream: what the model gets.
    """

    batch: Batch
    rows: list[int]
    stream: Stream


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    ranks: int,
    limits: Limits,
    packing: bool = True,
    factor: int = 1,
    unit: int = 1,
) -> Plan:
    """Who runs which rows when. Every row is in one micro-batch, with the others of its unit.

    Args:
        lengths: tokens of each row of the whole batch.
        ranks: data-parallel ranks.
        limits: see `Limits`.
        packing: whether rows lie end to end, so that only their sum counts; else rows of like
            length go together, and a micro-batch counts as its longest times its rows.
        factor: what the slots of a row are a multiple of.
        unit: so many rows, one behind the other, stay together and in order (see `Batch.unit`).

    Returns:
        [rank][micro-batch] rows; equally many micro-batches, at least one, on each rank.

    Raises:
        ValueError: the rows are no whole number of units.
    """
    sizes = _unit_sizes(lengths, unit, packing=packing, factor=factor)
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    if limits.rows is not None:
        rounds, each = _deal(order, ranks), max(limits.rows // unit, 1)
        groups = [rounds[at : at + each] for at in range(0, len(rounds), each)]
        plan = _of_rounds(groups, ranks, limits)
    elif not packing:
        plan = _of_rounds(_by_length(_deal(order, ranks), sizes, limits), ranks, limits)
    else:
        plan = _balanced(order, sizes, ranks, limits)
    return [[_rows(units, unit) for units in share] for share in plan]


def micro_batches(
    batch: Batch, shares: Sequence[Sequence[int]], cut: Cut, *, device: torch.device
) -> list[MicroBatch]:
    """One rank's micro-batches, ready for its model.

    Args:
        batch: the whole batch.
        shares: the rank's part of a `Plan`.
        cut: how rows are laid out here.
        device: where the model is.
    """
    result = []
    for rows in shares:
        real = _to_device(_trimmed(batch, rows), device)
        result.append(MicroBatch(batch=real, rows=list(rows), stream=lay_out(real, cut)))
    return result


def _unit_sizes(lengths: Sequence[int], unit: int, *, packing: bool, factor: int) -> list[int]:
    """Slots of each unit: of all its rows, or of all of them padded to its longest."""
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows are no whole number of units of {unit}")
    slots = [-(-length // factor) * factor for length in lengths]
    units = [slots[at : at + unit] for at in range(0, len(slots), unit)]
    return [sum(rows) if packing else unit * max(rows) for rows in units]


def _rows(units: Sequence[int], unit: int) -> list[int]:
    """The rows of some units, each unit's one behind the other."""
    return [index * unit + row for index in units for row in range(unit)]


def _of_rounds(groups: list[list[list[int]]], ranks: int, limits: Limits) -> Plan:
    """A plan in which each micro-batch has some rounds, of which each rank has one unit each."""
    groups = groups + [[]] * (_count(len(groups), limits) - len(groups))
    return [
        [[turn[rank] for turn in group if rank < len(turn)] for group in groups]
        for rank in range(ranks)
    ]


def _count(wanted: int, limits: Limits) -> int:
    """The least number of micro-batches that is not below `wanted` and that `limits` allow."""
    return max(-(-wanted // limits.multiple), 1) * limits.multiple


def _deal(order: Sequence[int], ranks: int) -> list[list[int]]:
    """Units in rounds, longest first: each rank gets one of each round, every other time in
    reverse, so that no rank gets the longer one always."""
    rounds = [list(order[at : at + ranks]) for at in range(0, len(order), ranks)]
    for index in range(1, len(rounds), 2):
        if len(rounds[index]) == ranks:
            rounds[index].reverse()
    return rounds


def _balanced(order: Sequence[int], sizes: Sequence[int], ranks: int, limits: Limits) -> Plan:
    """Packed micro-batches of like size: the longest unit left goes to the one with least tokens.

    If one is too large then, all is dealt again to a twentieth more of them.
    """
    units_each = -(-len(order) // ranks)
    fewest = -(-sum(sizes) // (ranks * limits.tokens))
    count = _count(max(fewest, min(limits.least, units_each)), limits)
    while True:
        bins: list[list[int]] = [[] for _ in range(ranks * count)]
        heap = [(0, index) for index in range(len(bins))]
        for unit in order:
            load, index = heap[0]
            bins[index].append(unit)
            heapq.heapreplace(heap, (load + sizes[unit], index))
        loads = [sum(sizes[unit] for unit in units) for units in bins]
        shared = [load for load, units in zip(loads, bins, strict=True) if len(units) > 1]
        if max(shared, default=0) <= limits.tokens:
            break
        count = _count(count + max(count // 20, 1), limits)
    heaviest = sorted(range(len(bins)), key=lambda index: (-loads[index], index))
    turns = _deal(heaviest, ranks)
    return [[bins[turn[rank]] for turn in turns] for rank in range(ranks)]


def _by_length(
    rounds: list[list[int]], sizes: Sequence[int], limits: Limits
) -> list[list[list[int]]]:
    """Cuts rounds, longest first, where shorter ones would be padded by more than another pass is
    worth, and where a pass would be too large."""
    longest = [max(sizes[unit] for unit in turn) for turn in rounds]
    most = max(-(-len(rounds) // limits.least), 1)
    groups, todo = [], [(0, len(rounds))] if rounds else []
    while todo:
        start, end = todo.pop()
        saving, cut = max(
            ((longest[start] - longest[at]) * (end - at), at) for at in range(start, end)
        )
        if saving < _SAVING:
            cut = start + min(max(limits.tokens // longest[start], 1), most)
        if cut >= end:
            groups.append(rounds[start:end])
        else:
            todo += [(cut, end), (start, cut)]
    return groups


def _trimmed(batch: Batch, rows: Sequence[int]) -> Batch:
    """The chosen rows, cut to the longest of them."""
    chosen = batch.rows(torch.tensor(rows, dtype=torch.int64))
    length = int(chosen.lengths.max()) if rows else 1
    return replace(
        chosen,
        tokens=chosen.tokens[:, :length],
        loss_mask=chosen.loss_mask[:, :length],
        per_token={name: tensor[:, :length] for name, tensor in chosen.per_token.items()},
        candidates={name: tensor[:, :length] for name, tensor in chosen.candidates.items()},
    )


def _to_device(batch: Batch, device: torch.device) -> Batch:
    def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device=device) for name, tensor in tensors.items()}

    return Batch(
        tokens=batch.tokens.to(device=device),
        lengths=batch.lengths.to(device=device),
        loss_mask=batch.loss_mask.to(device=device),
        per_token=move(batch.per_token),
        per_sequence=move(batch.per_sequence),
        candidates=move(batch.candidates),
        unit=batch.unit,
    )
