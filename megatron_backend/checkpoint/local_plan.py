"""What one rank writes of a model's state, and where in that state it is.

A plan is torch's own, made from the objects that Megatron-Core translates its shards into. Making
those takes as long as copying some hundred megabytes, but only names, shapes and places go into a
plan. So it is kept for as long as these are the same, and the tensors themselves are taken straight
from Megatron's shards.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

type State = Mapping[str, Sequence[ShardedTensor | ShardedObject]]
"""What this rank is the one to write, by its name in a checkpoint."""


class LocalPlan:
    """A rank's plan for states that look like the one it was made from.

    Attributes:
        plan: torch's.
    """

    def __init__(self, state: State) -> None:
        self._outline = _outline(state)
        self._planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        self._planner.set_up_planner(
            mcore_to_pyt_state_dict(dict(state)),
            is_coordinator=torch.distributed.get_rank() == 0,
        )
        self.plan = self._planner.create_local_plan()
        self._planner.finish_plan(self.plan)
        # It holds on to the state's tensors, and nothing asks for them again.
        self._planner.state_dict = {}

    def for_state(self, state: State) -> Self:
        """This plan, or a new one where `state` looks otherwise."""
        return self if self._outline == _outline(state) else type(self)(state)

    def parts(self, state: State) -> Iterator[tuple[WriteItem, Tensor | io.BytesIO]]:
        """What to write for each item of the plan, in its order, one at a time: what has to be
        copied first, such as a transposed view, is in memory by itself."""
        tensors = {
            (name, tuple(shard.global_offset)): shard.data
            for name, shards in state.items()
            for shard in shards
            if isinstance(shard, ShardedTensor)
        }
        for item in self.plan.items:
            index, data = item.index, item.tensor_data
            if item.type == WriteItemType.BYTE_IO:
                yield item, _pickled(state[index.fqn])
            else:
                assert index.offset is not None
                assert data is not None
                tensor = tensors[index.fqn, tuple(index.offset)].detach()
                # With the leading axis that Megatron adds to layers.
                yield item, tensor.reshape(data.chunk.sizes)

    def metadata(self, plans: Sequence[SavePlan]) -> Metadata:
        """Torch's description of a checkpoint that all ranks' plans have written."""
        _, metadata = self._planner.create_global_plan(list(plans))
        return metadata


def _outline(state: State) -> list[Any]:
    """All that a plan depends on."""
    return [
        (name, type(shard), shard.replica_id, shard.global_offset, shard.global_shape)
        + ((shard.local_shape, shard.dtype) if isinstance(shard, ShardedTensor) else ())
        for name, shards in state.items()
        for shard in shards
    ]


def _pickled(shards: Sequence[Any]) -> io.BytesIO:
    """Objects as Megatron-Core stores them."""
    file = io.BytesIO()
    torch.save([shard.data for shard in shards], file)
    return file
