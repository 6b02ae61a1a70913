"""The output layer of a model that says one number of each token: a reward model's, or a critic's.

It is whole on every tensor-parallel rank, which is cheap, and so is what it says: where hidden
states are whole there, no collective stands between them and values. Where the sequence is split
over those ranks each reads its own part only, so that the head's gradient is a share, as a norm's
is; it is marked in the same way, and Megatron then adds the shares up.

It is never tied to the embedding: a model with a value head has no matrix of tokens at its end, and
keeps its embedding once, on the first stage.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor

CHECKPOINT_KEY = "value_head.weight"
"""The head's name in checkpoints. It is not that of an output layer, which may have any number of
rows there: the first row of a vocabulary's would be loaded in the head's place."""


class ValueHead(torch.nn.Module):
    """A hidden state times one vector.

    Args:
        chunk: that it is the output layer of.
    """

    def __init__(self, chunk: GPTModel) -> None:
        super().__init__()
        self._tp_group = chunk.pg_collection.tp
        self.weight = torch.nn.Parameter(torch.empty(1, chunk.config.hidden_size))
        self.weight.sequence_parallel = (  # type: ignore[attr-defined]
            chunk.config.sequence_parallel
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[...] float32 from [..., hidden_size]; the product is in float32 whatever they are."""
        return torch.linalg.vecdot(hidden.float(), self.weight[0].float())

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Megatron's description for checkpoints, under `CHECKPOINT_KEY`."""
        shard = make_sharded_tensor_for_checkpoint(
            self.weight,
            CHECKPOINT_KEY,
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return {f"{prefix}weight": shard}
