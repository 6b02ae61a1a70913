"""A model's weights, and nothing else, from a published checkpoint of any layout.

The driver has compared it with its manifest's hashes before any rank reads it (`driver/start.py`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.gpt import GPTModel

from megatron_backend.checkpoint.contents import STATE
from megatron_backend.models.value_head import CHECKPOINT_KEY

_HEAD = "output_layer.weight"


def load_model_weights(chunks: Sequence[GPTModel], checkpoint: Path, *, prefix: str = "") -> bool:
    """Fills this rank's part of a model. Every rank of the model must call it.

    Rows that pad the vocabulary are zero where the checkpoint, written under another tensor
    parallelism, has fewer of them; the loss and the sampler never look at them.

    Args:
        chunks: as built; their layout need not be the checkpoint's.
        checkpoint: a published folder, `step-XXXXXXXX`.
        prefix: which of the checkpoint's models (see `contents.CRITIC`); the one that its job
            trained by default.

    Returns:
        False where the model has a value head and the checkpoint's has none: the head is then as it
        was, and all else is loaded.

    Raises:
        FileNotFoundError: there is no such checkpoint (any more).
        ValueError: the model predicts tokens, and the checkpoint's does not.
        megatron.core.dist_checkpointing.core.CheckpointingException: a tensor is missing or has
            another shape.
    """
    has_head = holds_value_model(checkpoint, prefix=prefix)
    if has_head and chunks[0].head == "vocabulary":
        raise ValueError(f"{checkpoint} is of a model with a value head, which predicts no tokens")
    state: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        shards = chunk.sharded_state_dict()
        if chunk.head == "value" and chunk.post_process and not has_head:
            missing[f"model{index}"] = {_HEAD: shards.pop(_HEAD).data}
        add_prefix_for_sharding(shards, prefix)
        state[f"model{index}"] = shards
    loaded = dist_checkpointing.load(state, str(checkpoint / STATE))
    for index, chunk in enumerate(chunks):
        name = f"model{index}"
        chunk.load_state_dict(loaded[name] | missing.get(name, {}))
    return has_head or chunks[0].head == "vocabulary"


def holds_value_model(checkpoint: Path, *, prefix: str = "") -> bool:
    """Whether a checkpoint's model has a value head.

    Raises:
        FileNotFoundError: there is no such checkpoint (any more).
    """
    folder = checkpoint / STATE
    if not folder.is_dir():
        raise FileNotFoundError(f"{checkpoint} holds no checkpoint: was it deleted?")
    return prefix + CHECKPOINT_KEY in dist_checkpointing.load_tensors_metadata(str(folder))
