"""The optimizer's state in the shapes of the whole model, with as few copies as can be.

Megatron's distributed optimizer keeps weights and moments as flat shards over data-parallel ranks.
Its `fully_reshardable` form puts them together again: each rank copies its shards into one buffer,
all ranks' buffers are gathered into another, and each parameter is a slice of that. Where there is
one data-parallel rank nothing has to be gathered, and each slice is a tensor that is there already:
two copies of the whole state, which training would wait for, are saved. A load makes an empty
buffer in the same way, and it too can do without.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def whole_state(
    optimizer: DistributedOptimizer, weights: dict[str, Any], metadata: dict[str, Any]
) -> dict[int, Any]:
    """The state to store, as Megatron's ShardedTensors. Collective over data-parallel ranks.

    Args:
        optimizer: one of Megatron's.
        weights: sharded state dicts of the model's chunks.
        metadata: names the form.
    """
    with without_copies([optimizer]):
        return dict(optimizer.sharded_param_state_fully_reshardable(weights, metadata=metadata))


@contextmanager
def without_copies(optimizers: Iterable[DistributedOptimizer]) -> Iterator[None]:
    """Inside the block the form's tensors are those that are there already, where all of an
    optimizer's state is on this rank: a save reads from them, and a load writes into them."""
    alone = [each for each in optimizers if each.data_parallel_group.size() == 1]
    for each in alone:
        each.get_parameter_state_dp_zero = partial(_tensors_in_place, each)
    try:
        yield
    finally:
        for each in alone:
            del each.get_parameter_state_dp_zero  # the class has its own


def start_moments(optimizer: DistributedOptimizer) -> None:
    """Gives an optimizer that has taken no step yet the moments that its first one begins with.

    They are 0. Adam makes them in its first step, and there may be none before a checkpoint: while
    only a critic learns, or where the first steps were left out.
    """
    if not optimizer.optimizer.state:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)


class _Slices:
    """A buffer of which only the slices of whole parameters are ever asked for."""

    def __init__(self, tensors: Mapping[tuple[int, int], torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, span: slice) -> torch.Tensor:
        return self._tensors[span.start, span.stop]


def _tensors_in_place(optimizer: DistributedOptimizer, **_: Any) -> dict[int, Any]:
    """What `get_parameter_state_dp_zero` gives, without copies."""
    state: dict[int, Any] = {}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        (dtype,) = ranges
        buffers: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
        for parameter, (start, end, _) in optimizer.buffers[index].param_index_map.items():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            for name in ("param", *optimizer.optimizer_state_keys):
                buffers.setdefault(name, {})[start, end] = tensors[name].flatten()
        state[index] = {dtype: {name: _Slices(slices) for name, slices in buffers.items()}}
    return state
