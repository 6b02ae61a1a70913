"""What the ranks write into a checkpoint: weights, optimizer state and random-number generators.

Weights and the distributed optimizer's state are in Megatron-Core's `torch_dist` format: every
tensor is stored under its name in the whole model, in pieces, so that any other layout can put its
own pieces together. Two things make that hold for the optimizer too. Its `fully_reshardable` form
undoes the flattening over data-parallel ranks before it writes, and both save and load must name
it. And Adam's step count must be in its parameter groups, which are stored whole (`training.adam`).
Where experts are spread over ranks Megatron gives them an optimizer of their own, and elsewhere
not; what is stored knows nothing of that. A critic is stored beside the policy (`trained_state`).

Generators are different: a rank's stream means something only to the same rank of the same layout.
Each rank writes its own file, and reads it back if the layout is the one that wrote; under another
layout ranks keep the streams that the job's seed gave them.

Planning and bytes are Megatron's and torch's own; the writing is ours (`staging`), so that hashes
are folded into it and a save can go through memory. Which rank writes what follows from the layout,
so plans are made and gathered once (`local_plan`): later saves only ask whether they are still the
same everywhere.
"""

import dataclasses
import errno
import io
import json
import pickle  # noqa: TID251 (the format's own index; what is read was hashed before)
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from megatron_backend.checkpoint.contents import RANDOM, STATE
from megatron_backend.checkpoint.local_plan import LocalPlan
from megatron_backend.checkpoint.staging import DirectFiles, Files, StagedFiles, Written
from megatron_backend.checkpoint.tensor_archive import write_tensor
from megatron_backend.checkpoint.trained_state import Models, StateToLoad, state_to_write

_TRACKED = "tracked."
_BACKEND = CheckpointingConfig("torch_dist", 1)
_ITEM_BYTES = 4096
"""More than what torch puts around a tensor in a file."""


class StateWriter:
    """One rank's saves. Every rank must make the same calls."""

    def __init__(self) -> None:
        self._memory: StagedFiles | None = None
        self._plan: LocalPlan | None = None
        self._written: tuple[SavePlan, bytes] | None = None  # the last one, and its `.metadata`

    def begin(self, staged: Path, models: Models, *, background: bool) -> Written | None:
        """Writes this rank's part, or copies it and has it written while the caller goes on.

        Args:
            staged: holds the empty folders `STATE` and `RANDOM`.
            models: this rank's part of what the job trains.
            background: copy now and write meanwhile; `result` then tells how that went.

        Returns:
            What became of the files; None where they are being written. Where one rank has no
            memory for its copy no rank writes, and all say so.
        """
        if not background:
            files = DirectFiles(staged)
            error = self._write(files, models)
            return Written(files=files.entries, error=error)
        if self._memory is None:
            self._memory = StagedFiles()
        error = self._write(self._memory, models)
        if _on_any_rank(error is not None):
            other = OSError(errno.ENOMEM, "another rank could not copy its part into memory")
            return Written(files={}, error=error or other)
        self._memory.flush(staged)
        return None

    def again(self, staged: Path) -> None:
        """Writes what was copied last once more, into another folder."""
        self._copied.flush(staged)

    def result(self, *, wait: bool) -> Written | None:
        """How the write in the background went; None while it goes on, unless `wait`."""
        return self._copied.result(wait=wait)

    def close(self) -> None:
        """Ends a write in the background, and gives the memory back."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @property
    def _copied(self) -> StagedFiles:
        if self._memory is None:
            raise RuntimeError("this rank has copied no state yet")
        return self._memory

    def _write(self, files: Files, models: Models) -> OSError | None:
        """Collective; an error of the storage is this rank's own, so the others are not left."""
        # Compares all ranks' names and shapes, which does not have to be done at each save.
        state = state_to_write(models, compare=self._plan is None)
        self._plan = LocalPlan(state) if self._plan is None else self._plan.for_state(state)
        plan = self._plan.plan
        rank, error = torch.distributed.get_rank(), None
        infos: dict[MetadataIndex, _StorageInfo] = {}
        try:
            if isinstance(files, StagedFiles):
                files.reset(_expected_bytes(plan))
            if plan.items:
                with files.open(f"{STATE}/{_data_file(rank)}") as file:
                    for item, data in self._plan.parts(state):
                        infos[item.index] = _store(file, data)
            with files.open(f"{RANDOM}/{_random_name(rank)}") as file:
                file.write(safetensors.torch.save(_generators()))
        except OSError as failure:
            error = failure
        plan = dataclasses.replace(plan, storage_data=infos)
        try:
            metadata = self._metadata(self._plan, plan)
            if rank == 0:
                with files.open(f"{STATE}/.metadata") as file:
                    file.write(metadata)
                with files.open(f"{STATE}/metadata.json") as file:
                    file.write(json.dumps(dataclasses.asdict(_BACKEND)).encode())
        except OSError as failure:
            error = error or failure
        return error

    def _metadata(self, planner: LocalPlan, plan: SavePlan) -> bytes:
        """What `.metadata` holds; right on rank 0 only. Collective."""
        last = self._written
        if not _on_any_rank(last is None or last[0] != plan):
            assert last is not None
            return last[1]
        leads = torch.distributed.get_rank() == 0
        plans: list[Any] | None = [None] * torch.distributed.get_world_size() if leads else None
        torch.distributed.gather_object(plan, plans)
        written = b""
        if plans is not None:
            storage = {}
            for each in plans:
                storage.update(each.storage_data)
            bare = [dataclasses.replace(each, storage_data=None) for each in plans]
            metadata = planner.metadata(bare)
            metadata.storage_data = storage
            written = pickle.dumps(metadata)
        self._written = (plan, written)
        return written


def _on_any_rank(true_here: bool) -> bool:
    """Whether it is true on any rank. Collective."""
    flag = torch.tensor([true_here], dtype=torch.int32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def save_state(staged: Path, models: Models) -> Written:
    """Writes this rank's part and waits for it; see `StateWriter.begin`."""
    written = StateWriter().begin(staged, models, background=False)
    assert written is not None
    return written


def load_state(checkpoint: Path, models: Models, *, same_layout: bool) -> None:
    """Restores this rank's part. Every rank must call it.

    Args:
        checkpoint: a published folder.
        models: as built, under any layout.
        same_layout: the checkpoint was written under this very layout.

    Raises:
        megatron.core.dist_checkpointing.core.CheckpointingException: the checkpoint holds other
            models or optimizers.
    """
    wanted = StateToLoad(models)
    wanted.put_back(
        dist_checkpointing.load(
            wanted.request, str(checkpoint / STATE), strict=StrictHandling.RAISE_ALL
        )
    )
    if same_layout:
        name = _random_name(torch.distributed.get_rank())
        _set_generators(safetensors.torch.load_file(checkpoint / RANDOM / name))


def _expected_bytes(plan: SavePlan) -> int:
    total = 0
    for item in plan.items:
        total += _ITEM_BYTES
        if item.tensor_data is not None:
            itemsize = item.tensor_data.properties.dtype.itemsize
            total += item.tensor_data.chunk.sizes.numel() * itemsize
    return total


def _store(file: Any, data: torch.Tensor | io.BytesIO) -> _StorageInfo:
    """Writes one item as torch's own distributed checkpoints do."""
    start = file.tell()
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
    else:
        write_tensor(data.cpu(), file)
    return _StorageInfo(_data_file(torch.distributed.get_rank()), start, file.tell() - start)


def _data_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _random_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _generators() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[_TRACKED + name] = state.clone()
    return states


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states.pop("cpu"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(_TRACKED): state for name, state in states.items()}
    )
