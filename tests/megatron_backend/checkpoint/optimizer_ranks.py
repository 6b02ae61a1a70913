"""What the rank does in test_optimizer_state.py."""

import torch

from service.spec.layout import Layout
from tests.megatron_backend.checkpoint.reshard_ranks import take_steps, trainer


def tensors_to_load(_rank: int, dtype: torch.dtype) -> tuple[set[int], set[int]]:
    """Where a load will write optimizer state, and where that state is."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron_backend.checkpoint.trained_state import StateToLoad

    trained = trainer(Layout(), "qwen2", dtype=dtype)
    take_steps(trained, 0, 1)
    asked = {
        each.data.data_ptr()
        for each in nested_values(StateToLoad({"": trained}).request["moments"])
        if isinstance(each, ShardedTensor)
    }
    (optimizer,) = trained.optimizer.chained_optimizers
    state = optimizer.optimizer.state
    there = {shard.data_ptr() for shard in state}
    return asked, there | {
        moments[name].data_ptr() for moments in state.values() for name in ("exp_avg", "exp_avg_sq")
    }
