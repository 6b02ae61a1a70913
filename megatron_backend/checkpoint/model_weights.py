"""A model's weights, and nothing else, from a published checkpoint of any layout."""

from collections.abc import Sequence
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel

from megatron_backend.checkpoint.contents import STATE


def load_model_weights(chunks: Sequence[GPTModel], checkpoint: Path) -> None:
    """Fills this rank's part of a model. Every rank of the model must call it.

    Rows that pad the vocabulary are zero where the checkpoint, written under another tensor
    parallelism, has fewer of them; the loss and the sampler never look at them.

    Args:
        chunks: as built; their layout need not be the checkpoint's.
        checkpoint: a published folder, `step-XXXXXXXX`.

    Raises:
        FileNotFoundError: there is no such checkpoint (any more).
        megatron.core.dist_checkpointing.core.CheckpointingException: a tensor is missing or has
            another shape.
    """
    folder = checkpoint / STATE
    if not folder.is_dir():
        raise FileNotFoundError(f"{checkpoint} holds no checkpoint: was it deleted?")
    state = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(state, str(folder))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
