"""Forward (and backward) of a batch through Megatron's schedules, for any layout.

The last stage's output is not logits but what a loss reads of them: log-probs and entropies of the
trained tokens. Nothing else is computed, since a vocabulary is wide, and most tokens of a
conversation are prompts and observations, whose probabilities no loss reads.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from algorithms.batch import PolicyOutputs
from megatron_backend.models.packing import packed_sequences
from megatron_backend.training.log_probs import Vocabulary, linear_log_probs
from megatron_backend.training.micro_batch import MicroBatch
from megatron_backend.training.stages import chunk_stages

type Finish = Callable[[PolicyOutputs, MicroBatch], tuple[Tensor, Any]]
"""What a last stage does with a micro-batch's outputs: a scalar to go backward from, and a value to
collect."""


def run(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    finish: Finish,
    *,
    vocab_size: int,
    temperature: float,
    softcap: float | None = None,
    backward: bool,
) -> list[Any]:
    """Runs every micro-batch through the model, and `finish` on the last stage.

    Gradients add up in the model's buffers; nothing scales `finish`'s scalars. Outputs are whole
    on every context-parallel rank, so each of them calls `finish` with the same, and gradients flow
    on each through its own tokens only: their sum over these ranks is the gradient.

    Args:
        chunks: this rank's part of the model, or their data-parallel wrappers.
        batches: at least one, equally many on every rank (see `plan_micro_batches`).
        finish: see `Finish`.
        vocab_size: number of real tokens.
        temperature: divides the logits.
        softcap: what the model caps its logits with, or None.
        backward: whether to compute gradients.

    Returns:
        What `finish` gave for each micro-batch; empty on ranks that are not on the last stage.
    """
    vocabulary = Vocabulary(
        size=vocab_size,
        temperature=temperature,
        softcap=softcap,
        group=parallel_state.get_tensor_model_parallel_group(),
    )

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        micro = next(iterator)
        packed = None
        if micro.stream.sequences is not None and micro.stream.positions is not None:
            packed = packed_sequences(micro.stream.sequences, micro.stream.positions)

        def loss(values: Tensor) -> tuple[Tensor, Tensor, Any]:
            scalar, value = finish(policy_outputs(values, micro), micro)
            # Megatron's denominator of a token mean; ours is in the scalar already.
            return scalar, torch.zeros((), dtype=torch.int, device=values.device), value

        output = model(
            input_ids=micro.stream.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed,
            padding_mask=_padding_mask(model, micro),
            output_processor=partial(_log_probs, micro, vocabulary),
        )
        return output, loss

    length = batches[0].stream.tokens.shape[1] * parallel_state.get_context_parallel_world_size()
    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=len(batches[0].stream.tokens),
        forward_only=not backward,
        **chunk_stages(chunks),
    )
    return collected


def trained_places(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """(slots, tokens), both [N] int64: which of this rank's slots predict a trained token, and
    which token that is, as an index into the flattened batch.

    Slots count as `Stream.source` does. The slot of token i predicts token i + 1.
    """
    mask = micro.batch.loss_mask.flatten() > 0
    following = micro.stream.source + 1
    # Column 0 is nobody's successor: there, and past the last row, index i + 1 is another row's.
    inside = (micro.stream.source >= 0) & (following % micro.batch.loss_mask.shape[1] > 0)
    following = following * inside
    slots = (mask[following] & inside).nonzero().squeeze(1) if len(mask) else following[:0]
    return slots, following[slots]


def policy_outputs(values: Tensor, micro: MicroBatch) -> PolicyOutputs:
    """What the model says of the micro-batch's rows, whole on every context-parallel rank.

    Args:
        values: [2, N], log-probs and entropies of this rank's `trained_places`.
        micro: the rows.
    """
    _, tokens = trained_places(micro)
    mask = micro.batch.loss_mask
    grid = values.new_zeros((2, mask.numel())).index_copy(1, tokens, values).view(2, *mask.shape)
    if parallel_state.get_context_parallel_world_size() > 1:
        group = parallel_state.get_context_parallel_group()
        grid = reduce_from_tensor_model_parallel_region(grid, group=group)
    return PolicyOutputs(log_probs=grid[0], entropy=grid[1].detach())


def _log_probs(
    micro: MicroBatch,
    vocabulary: Vocabulary,
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    config: TransformerConfig,
    **_rest: Any,
) -> Tensor:
    """[2, N]: log-probs and entropies of `trained_places`, instead of the output layer's logits."""
    slots, tokens = trained_places(micro)
    if config.sequence_parallel:
        # Megatron's output layer would gather after this; its gradient scatters the ranks' shares.
        whole = gather_from_sequence_parallel_region(hidden_states, group=vocabulary.group)
        wanted = whole.flatten(0, 1).index_select(0, slots)
    else:
        wanted = hidden_states.flatten(0, 1).index_select(0, slots)
        wanted = copy_to_tensor_model_parallel_region(wanted, group=vocabulary.group)
    weight = output_weight if output_weight is not None else output_layer.get_parameter("weight")
    targets = micro.batch.tokens.flatten()[tokens]
    return torch.stack(linear_log_probs(wanted, weight, targets, vocabulary))


def _padding_mask(model: torch.nn.Module, micro: MicroBatch) -> Tensor | None:
    """[R, T] bool, True in filler, for routers of mixtures of experts; None where it is not needed.

    Megatron cuts it for sequence parallelism beside the embedding, and only there.
    """
    config: TransformerConfig = get_attr_wrapped_model(model, "config")
    filler = micro.stream.filler
    if not config.num_moe_experts or not filler.any():
        return None
    if config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
        return scatter_to_sequence_parallel_region(filler.t().contiguous()).t().contiguous()
    return filler


def freeze(model: GPTModel) -> GPTModel:
    """The model without gradients, for a reference."""
    return model.requires_grad_(False).eval()
