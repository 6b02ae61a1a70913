"""Forward (and backward) of a batch through Megatron's schedules, for any layout.

The last stage's output is not logits but what is read of them: log-probs and entropies of the
trained tokens, and log-probs of other candidates in their place. Nothing else is computed, since a
vocabulary is wide, and most tokens of a conversation are prompts and observations, whose
probabilities no loss reads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from megatron_backend.training.likeliest import likeliest
from megatron_backend.training.log_probs import Vocabulary, linear_log_probs
from megatron_backend.training.micro_batch import MicroBatch
from megatron_backend.training.stages import chunk_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What a last stage has where its output layer would be called.

    Attributes:
        hidden: [T, R, H]; of the sequence only this rank's part where it is split.
        output_layer: Megatron's.
        weight: [V / tp, H], its rows on this rank.
        config: Megatron's.
    """

    hidden: Tensor
    output_layer: torch.nn.Module
    weight: Tensor
    config: TransformerConfig

    def at(self, slots: Tensor) -> Tensor:
        """[N, H], the same on all tensor-parallel ranks; slots count as `Stream.source` does."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self.config.sequence_parallel:
            # Megatron's output layer would gather after this; its gradient scatters the shares.
            whole = gather_from_sequence_parallel_region(self.hidden, group=group)
            return whole.flatten(0, 1).index_select(0, slots)
        wanted = self.hidden.flatten(0, 1).index_select(0, slots)
        return copy_to_tensor_model_parallel_region(wanted, group=group)


type Read = Callable[[States, MicroBatch, Vocabulary], Any]
"""What a last stage makes of its hidden states, instead of logits."""
type Finish = Callable[[Any, MicroBatch], tuple[Tensor, Any]]
"""What a last stage does with what was read of a micro-batch: a scalar to go backward from, and a
value to collect."""


def read_policy(states: States, micro: MicroBatch, vocabulary: Vocabulary) -> PolicyOutputs:
    """What the model says of the micro-batch's rows, whole on every context-parallel rank."""
    slots, tokens = trained_places(micro)
    asked = micro.batch.tokens.flatten()[tokens].unsqueeze(1)
    candidates = micro.batch.candidates.get("candidate_ids")
    if candidates is not None:
        asked = torch.cat([asked, candidates.flatten(0, 1)[tokens]], dim=1)
    log_probs, entropy = linear_log_probs(states.at(slots), states.weight, asked, vocabulary)
    said = None if candidates is None else in_rows(log_probs[:, 1:], tokens, micro)
    return PolicyOutputs(
        log_probs=in_rows(log_probs[:, 0], tokens, micro),
        entropy=in_rows(entropy, tokens, micro),
        candidate_log_probs=said,
    )


def read_likeliest(
    count: int, states: States, micro: MicroBatch, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """(ids, log-probs), [B, T, K] each: see `algorithms.protocols.Teacher.likeliest`."""
    slots, tokens = trained_places(micro)
    ids, log_probs = likeliest(states.at(slots), states.weight, count, vocabulary)
    return in_rows(ids, tokens, micro), in_rows(log_probs, tokens, micro)


def run(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    finish: Finish,
    *,
    vocab_size: int,
    temperature: float,
    softcap: float | None = None,
    backward: bool,
    read: Read = read_policy,
) -> list[Any]:
    """Runs every micro-batch through the model, `read` and `finish` on the last stage.

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
        read: see `Read`.

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
        packed, stream = None, micro.stream
        if stream.sequences is not None and stream.positions is not None:
            packed = packed_sequences(stream.sequences, stream.positions, stream.blank)

        def loss(outputs: Any) -> tuple[Tensor, Tensor, Any]:
            scalar, value = finish(outputs, micro)
            # Megatron's denominator of a token mean; ours is in the scalar already.
            return scalar, torch.zeros((), dtype=torch.int, device=scalar.device), value

        output = model(
            input_ids=micro.stream.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed,
            padding_mask=_padding_mask(model, micro),
            output_processor=partial(_read, read, micro, vocabulary),
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


def in_rows(values: Tensor, tokens: Tensor, micro: MicroBatch) -> Tensor:
    """[B, T, ...] from what this rank knows of some tokens, whole on every context-parallel rank.

    Args:
        values: [N, ...], with or without gradient.
        tokens: [N], as `trained_places` gives them; elsewhere the result is 0.
        micro: the rows.
    """
    mask = micro.batch.loss_mask
    grid = values.new_zeros((mask.numel(), *values.shape[1:])).index_copy(0, tokens, values)
    grid = grid.view(*mask.shape, *values.shape[1:])
    if parallel_state.get_context_parallel_world_size() > 1:
        group = parallel_state.get_context_parallel_group()
        grid = reduce_from_tensor_model_parallel_region(grid, group=group)
    return grid


def _read(
    read: Read,
    micro: MicroBatch,
    vocabulary: Vocabulary,
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    config: TransformerConfig,
    **_rest: Any,
) -> Any:
    """Megatron calls it in the place of the output layer."""
    weight = output_weight if output_weight is not None else output_layer.get_parameter("weight")
    states = States(hidden=hidden_states, output_layer=output_layer, weight=weight, config=config)
    return read(states, micro, vocabulary)


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
