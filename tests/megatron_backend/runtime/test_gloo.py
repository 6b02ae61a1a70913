"""Collectives of uneven parts, which gloo lacks, against what they mean."""

from typing import Any

import torch
from torch import Tensor

from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks


def parts(rank: int) -> list[Tensor]:
    """What one rank would scatter: 1, 3 and no rows of 2 numbers."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(rows, 2, generator=generator) for rows in (1, 3, 0)]


def exchange(rank: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Each of the collectives among three ranks."""
    gathered = [torch.empty_like(part) for part in parts(0)]
    torch.distributed.all_gather(gathered, parts(0)[rank])
    scattered = torch.empty_like(parts(0)[rank])
    torch.distributed.reduce_scatter(scattered, parts(rank))
    received: Any = torch.empty(3 * len(parts(0)[rank]), 2)
    torch.distributed.all_to_all_single(
        received,
        torch.cat(parts(rank)),
        torch.tensor([len(parts(0)[rank])] * 3),
        torch.tensor([1, 3, 0]),
    )
    return gathered, scattered, received


def test_uneven_parts_arrive_whole(ranks: Ranks) -> None:
    everything = [parts(rank) for rank in range(3)]
    for rank, (gathered, scattered, received) in enumerate(ranks.run(Layout(dp=3), exchange)):
        for ours, theirs in zip(gathered, parts(0), strict=True):
            assert torch.equal(ours, theirs)
        total = everything[0][rank] + everything[1][rank] + everything[2][rank]
        torch.testing.assert_close(scattered, total)
        assert torch.equal(received, torch.cat([sent[rank] for sent in everything]))
