"""The trained model's logits, whole, for comparison with another implementation."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_backend.training.stages import chunk_stages


def whole_logits(
    chunks: Sequence[torch.nn.Module], tokens: Tensor, *, vocab_size: int
) -> Tensor | None:
    """Forward through every stage of the layout. Every rank must call it.

    Args:
        chunks: this rank's part (their data-parallel wrappers).
        tokens: [B, T] int64, on the model's device, the same on every rank.
        vocab_size: number of real tokens.

    Returns:
        [B, T, V] float32 on the last pipeline stage, None on the others.
    """

    def forward_step(iterator: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, Any]:
        output = model(input_ids=next(iterator), position_ids=None, attention_mask=None)

        def collect(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            nothing = torch.zeros((), device=logits.device)
            return nothing, nothing.int(), logits

        return output, collect

    was_training = chunks[0].training
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        collected = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter([tokens]) for _ in chunks],
            model=list(chunks),
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=True,
            **chunk_stages(chunks),
        )
        for chunk in chunks:
            chunk.train(was_training)
        if not collected:
            return None
        whole: Tensor = gather_from_tensor_model_parallel_region(collected[0])
        return whole[..., :vocab_size].float()
