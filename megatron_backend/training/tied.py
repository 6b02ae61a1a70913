"""Tied embeddings that are kept twice.

With pipeline stages the first one embeds tokens and the last one makes logits, so a tied matrix is
on both. Their gradients are summed over the two before each step, so both take the same steps and
stay the same to the bit. Where they do not, the job trains another model than it saves.
"""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel


def tied_difference(model: Sequence[GPTModel]) -> float | None:
    """Largest difference between the copies. Every rank must call it.

    Args:
        model: this rank's chunks.

    Returns:
        None on a rank without a copy, and everywhere where there is only one.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    weights = [
        chunk.shared_embedding_or_output_weight()
        for chunk in model
        if chunk.share_embeddings_and_output_weights and (chunk.pre_process or chunk.post_process)
    ]
    if not weights:
        return None
    highest = weights[0].detach().clone()
    lowest = highest.clone()
    group = parallel_state.get_embedding_group()
    torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=group)
    torch.distributed.all_reduce(lowest, torch.distributed.ReduceOp.MIN, group=group)
    return float((highest - lowest).abs().max())
