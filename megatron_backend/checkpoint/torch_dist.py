"""What the ranks write into a checkpoint: weights, optimizer state and random-number generators.

Weights and the distributed optimizer's state are in Megatron-Core's `torch_dist` format: every
tensor is stored under its name in the whole model, in pieces, so that any other layout can put its
own pieces together. Two things make that hold for the optimizer too. Its `fully_reshardable` form
undoes the flattening over data-parallel ranks before it writes, and both save and load must name
it. And Adam's step count must be in its parameter groups, which are stored whole (`training.adam`).

Generators are different: a rank's stream means something only to the same rank of the same layout.
Each rank writes its own file, and reads it back if the layout is the one that wrote; under another
layout ranks keep the streams that the job's seed gave them.
"""

import queue
from pathlib import Path

import safetensors.torch
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_backend.checkpoint.contents import RANDOM, STATE

_TRACKED = "tracked."
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def save_state(staged: Path, model: GPTModel, optimizer: MegatronOptimizer) -> None:
    """Writes this rank's part. Every rank must call it; it returns when all have written.

    Args:
        staged: holds the empty folders `STATE` and `RANDOM`, so that no rank has to wait for them.
        model: this rank's part.
        optimizer: over its parameters; it must have taken a step.
    """
    # The writer's results come back through a queue. Megatron makes it in a process of its own,
    # for saves that run in another process than the caller; ours do not, and need no process each.
    filesystem_async._results_queue = queue.SimpleQueue()
    weights = model.sharded_state_dict()
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=_FORMAT),
    }
    dist_checkpointing.save(state, str(staged / STATE), content_metadata=dict(_FORMAT))
    safetensors.torch.save_file(_generators(), _random_file(staged))


def load_state(
    checkpoint: Path, model: GPTModel, optimizer: MegatronOptimizer, *, same_layout: bool
) -> None:
    """Restores this rank's part. Every rank must call it.

    Args:
        checkpoint: a published folder.
        model: as built, under any layout.
        optimizer: over this model's parameters.
        same_layout: the checkpoint was written under this very layout.

    Raises:
        megatron.core.dist_checkpointing.core.CheckpointingException: the checkpoint holds another
            model or optimizer.
    """
    weights = model.sharded_state_dict()
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=_FORMAT),
    }
    loaded = dist_checkpointing.load(
        state, str(checkpoint / STATE), strict=StrictHandling.RAISE_ALL
    )
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if same_layout:
        _set_generators(safetensors.torch.load_file(_random_file(checkpoint)))


def _random_file(folder: Path) -> Path:
    return folder / RANDOM / f"rank-{torch.distributed.get_rank():05d}.safetensors"


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
