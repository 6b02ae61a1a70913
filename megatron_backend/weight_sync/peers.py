"""What a sync needs of a process group: lists from everybody, a meeting, buffers from rank to rank.

The group may be the ranks' common world, or one that `join_peers` makes of ranks that belong to
different worlds, as a trainer's and a separate generator's do: torch knows one default group for a
process, and both have theirs already.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_backend.runtime.distributed import device


def join_peers(
    *, address: str, port: int, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
) -> dist.ProcessGroup:
    """A process group beside the default one, whose members may be of different worlds.

    Every member must call it; it returns when all have.

    Args:
        address: host name of rank 0 of this group.
        port: a free port on it.
        rank: this process's number in this group.
        size: of this group.
        timeout: how long a member waits for the others, now and in a sync.
    """
    store = TCPStore(address, port, size, is_master=rank == 0, timeout=timeout)
    group = dist.ProcessGroup(store, rank, size)
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(device(), kind, backend)
    return group


def gather_json(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """What each rank gave, in rank order. Every rank must call it."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = _gather(group, torch.tensor([len(data)]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(data)] = data
    return [
        json.loads(bytes(row[: int(size)].tolist()))
        for row, size in zip(_gather(group, padded), sizes, strict=True)
    ]


def meet(group: dist.ProcessGroup) -> None:
    """Returns when every rank has come here, and what each wrote before can be read."""
    token = torch.zeros(1, device=device())
    group.allreduce([token]).wait()
    token.item()


def exchange(
    group: dist.ProcessGroup,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
) -> None:
    """Sends and receives contiguous buffers, in the order of the lists between any two ranks."""
    works = []
    if torch.cuda.is_available():
        # NCCL pairs calls by their order, so all of them must be in flight together.
        operations = [
            dist.P2POp(dist.isend, buffer, group=group, group_peer=peer) for peer, buffer in sends
        ] + [
            dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer)
            for peer, buffer in receives
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
    else:
        works += [group.recv([buffer], peer, 0) for peer, buffer in receives]
        works += [group.send([buffer], peer, 0) for peer, buffer in sends]
    for work in works:
        work.wait()


def _gather(group: dist.ProcessGroup, value: Tensor) -> list[Tensor]:
    value = value.to(device())
    rows = [torch.empty_like(value) for _ in range(group.size())]
    group.allgather([rows], [value]).wait()
    return [row.cpu() for row in rows]
