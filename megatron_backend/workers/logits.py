"""The trained model's logits, whole, for comparison with another implementation."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from algorithms.batch import Batch
from megatron_backend.training.micro_batch import MicroBatch, micro_batches
from megatron_backend.training.sequence import Cut
from megatron_backend.training.stages import chunk_stages
from service.spec.layout import Layout


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

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        slots = next(iterator).stream.tokens
        output = model(input_ids=slots, position_ids=None, attention_mask=None)

        def collect(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            nothing = torch.zeros((), device=logits.device)
            return nothing, nothing.int(), logits

        return output, collect

    batches = _micro_batches(get_attr_wrapped_model(chunks[0], "config"), tokens)
    was_training = chunks[0].training
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        collected = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=True,
            **chunk_stages(chunks),
        )
        for chunk in chunks:
            chunk.train(was_training)
        if not collected:
            return None
        logits: Tensor = gather_from_tensor_model_parallel_region(collected[0])
        return _whole(logits[..., :vocab_size].float(), batches[0], tokens)


def _micro_batches(config: TransformerConfig, tokens: Tensor) -> list[MicroBatch]:
    """All rows in one; with virtual stages, which go in rounds, more that have none."""
    layout = Layout(
        tp=config.tensor_model_parallel_size,
        cp=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel,
    )
    rank = parallel_state.get_context_parallel_rank()
    batch = Batch(
        tokens=tokens,
        lengths=torch.full((len(tokens),), tokens.shape[1]),
        loss_mask=torch.ones(tokens.shape),
    )
    virtual = config.virtual_pipeline_model_parallel_size is not None
    shares: list[list[int]] = [list(range(len(tokens)))]
    shares += [[]] * (config.pipeline_model_parallel_size - 1 if virtual else 0)
    cut = Cut.of(layout, packing=False, cp_rank=rank)
    return micro_batches(batch, shares, cut, device=tokens.device)


def _whole(logits: Tensor, micro: MicroBatch, tokens: Tensor) -> Tensor:
    """[B, T, V] from [B, slots, V] of each context-parallel rank."""
    held = micro.stream.source >= 0
    places = micro.stream.source[held]
    whole = logits.new_zeros(tokens.numel(), logits.shape[-1])
    whole[places] = logits.transpose(0, 1).flatten(0, 1)[held]
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole.unflatten(0, tokens.shape)
