"""Weight sync as it is done without a plan: whole tensors, one after another.

Two trainer ranks gather each tensor of their shards; rank 0 sends it to the generator's process by
a gloo broadcast, or all of them as the bytes of one `torch.save` through a pipe.

Options: `sizes` of the model.
"""

import io
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.bench.sides import program
from tests.bench.sides.fixed_llama import shapes

RANKS = 3
GENERATOR = 2
SYNCS = 4


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The fastest of some syncs, each way."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.spawn(
        _rank, args=(options, str(case), sender, receiver), nprocs=RANKS, join=False
    )
    while not context.join():
        pass
    result: dict[str, Any] = torch.load(case / "naive.pt")
    return result


def _whole(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _rank(
    rank: int, options: dict[str, Any], case: str, sender: Connection, receiver: Connection
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{case}/rendezvous", rank=rank, world_size=RANKS
    )
    trainers = dist.new_group([0, 1])
    everyone = list(enumerate(shapes(options["sizes"])))
    if rank == GENERATOR:
        tensors = [torch.empty(shape) for _, (shape, _) in everyone]
    else:
        tensors = [
            _whole(number, shape)
            if cut is None
            else _whole(number, shape).chunk(2, cut)[rank].contiguous()
            for number, (shape, cut) in everyone
        ]
    cuts = [cut for _, (_, cut) in everyone]
    seconds: dict[str, list[float]] = {"broadcast": [], "pipe": []}
    for _ in range(SYNCS):
        dist.barrier()
        start = time.perf_counter()
        for tensor, cut in zip(tensors, cuts, strict=True):
            whole = tensor if rank == GENERATOR else _gathered(tensor, cut, trainers)
            dist.broadcast(whole, 0)
        seconds["broadcast"].append(time.perf_counter() - start)
    wrong = rank == GENERATOR and any(
        not torch.equal(tensor, _whole(number, shape))
        for tensor, (number, (shape, _)) in zip(tensors, everyone, strict=True)
    )
    for _ in range(SYNCS):
        dist.barrier()
        start = time.perf_counter()
        if rank == GENERATOR:
            taken = torch.load(io.BytesIO(receiver.recv_bytes()))
            for tensor, new in zip(tensors, taken, strict=True):
                tensor.copy_(new)
        else:
            gathered = [
                _gathered(tensor, cut, trainers) for tensor, cut in zip(tensors, cuts, strict=True)
            ]
            if rank == 0:
                buffer = io.BytesIO()
                torch.save(gathered, buffer)
                sender.send_bytes(buffer.getbuffer())
        dist.barrier()
        seconds["pipe"].append(time.perf_counter() - start)
    if rank == GENERATOR:
        result = {
            "seconds": {name: min(times[1:]) for name, times in seconds.items()},
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "right": not wrong,
        }
        torch.save(result, f"{case}/naive.pt")
    dist.destroy_process_group()


def _gathered(tensor: torch.Tensor, cut: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    if cut is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts, cut)


if __name__ == "__main__":
    program.run(work)
