"""torch's distributed checkpoints of as many bytes, in as many tensors, on two gloo ranks.

Weights, fp32 copies and both moments, cut as tensor parallelism cuts them. Loading asks for each
tensor whole: on two ranks half of the tensors each, as two pipeline stages would, and on one all.

Options: `sizes` of the model, `copies` of each tensor.
"""

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.bench.sides import program
from tests.bench.sides.fixed_llama import shapes

RANKS = 2
SAVES = 3
LAST = f"sync-{SAVES - 1}"


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Saves and loads, and gives the seconds of each."""
    folder = case / "dcp"
    folder.mkdir()
    try:
        for stage in (_save, _load_halves):
            multiprocessing.spawn(stage, args=(str(folder), options), nprocs=RANKS)
        alone = _load(folder, _names(options), no_dist=True)
        seconds = torch.load(folder / "seconds.pt") | torch.load(folder / "halves.pt")
        size = sum(p.stat().st_size for p in (folder / LAST).rglob("*") if p.is_file())
    finally:
        shutil.rmtree(folder)
    return {"seconds": {**seconds, "load tp1": alone}, "bytes": size}


def _names(options: dict[str, Any]) -> list[tuple[str, tuple[int, ...], int | None]]:
    return [
        (f"{copy}.{number}", shape, cut)
        for copy in range(options["copies"])
        for number, (shape, cut) in enumerate(shapes(options["sizes"]))
    ]


def _values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(name.replace(".", "")))
    return torch.randn(shape, generator=generator)


def _join(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)


def _save(rank: int, folder: str, options: dict[str, Any]) -> None:
    _join(rank, f"{folder}/saving")
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {}
    for name, shape, cut in _names(options):
        whole = _values(name, shape)
        if cut is None:
            state[name] = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        else:
            part = whole.chunk(RANKS, cut)[rank].contiguous()
            state[name] = DTensor.from_local(part, mesh, [Shard(cut)], run_check=False)
    times: dict[str, list[float]] = {"save": [], "stall": []}
    writer: dict[str, Any] = {"single_file_per_rank": True, "sync_files": True}
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for attempt in range(SAVES):  # the first makes the plans
        dist.barrier()
        start = time.perf_counter()
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(f"{folder}/sync-{attempt}", **writer),
            planner=planner,
        )
        dist.barrier()
        times["save"].append(time.perf_counter() - start)
        if rank == 0 and attempt:
            shutil.rmtree(f"{folder}/sync-{attempt - 1}")
    # torch 2.14 cannot copy a DTensor that is on a CPU: each rank's parts go by names of their own.
    own = dist.new_group()  # its thread must not meet our barriers
    parts = {f"{name}.{rank}": value.to_local() for name, value in state.items()}
    for attempt in range(SAVES):
        dist.barrier()
        start = time.perf_counter()
        response = dcp.async_save(
            parts,
            process_group=own,
            storage_writer=dcp.FileSystemWriter(f"{folder}/async-{attempt}", **writer),
            planner=planner,
        )
        dist.barrier()
        times["stall"].append(time.perf_counter() - start)
        response.result()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{folder}/async-{attempt}")
    if rank == 0:
        seconds = {kind: median(each[1:]) for kind, each in times.items()}
        torch.save(seconds, f"{folder}/seconds.pt")
    dist.destroy_process_group()


def _load_halves(rank: int, folder: str, options: dict[str, Any]) -> None:
    _join(rank, f"{folder}/loading")
    names = _names(options)
    half = len(names) // RANKS
    mine = names[:half] if rank == 0 else names[half:]
    dist.barrier()
    seconds = _load(Path(folder), mine, no_dist=False)
    if rank == 0:
        torch.save({"load pp2": seconds}, f"{folder}/halves.pt")
    dist.destroy_process_group()


def _load(
    folder: Path, names: list[tuple[str, tuple[int, ...], int | None]], *, no_dist: bool
) -> float:
    state = {name: torch.zeros(shape) for name, shape, _ in names}
    start = time.perf_counter()
    dcp.load(state, storage_reader=dcp.FileSystemReader(str(folder / LAST)), no_dist=no_dist)
    if not no_dist:
        dist.barrier()
    seconds = time.perf_counter() - start
    for name, shape, _ in names[:: max(len(names) // 8, 1)]:
        if not torch.equal(state[name], _values(name, shape)):
            raise AssertionError(f"{name} was not loaded as it was saved")
    return seconds


if __name__ == "__main__":
    program.run(work)
