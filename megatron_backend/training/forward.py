"""Forward (and backward) of a batch through Megatron's schedules, for any layout.

Logits are computed only for the tokens that somebody asks about. A vocabulary is wide, and most
tokens of a conversation are prompts and observations, whose probabilities a loss never reads.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed import ProcessGroup

from algorithms.batch import PolicyOutputs
from megatron_backend.training.log_probs import vocabulary_log_probs
from megatron_backend.training.micro_batch import MicroBatch

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
    group: ProcessGroup,
    trained_only: bool,
    backward: bool,
) -> list[Any]:
    """Runs every micro-batch through the model, and `finish` on the last stage.

    Gradients add up in the model's buffers; nothing scales `finish`'s scalars.

    Args:
        chunks: this rank's part of the model, or their data-parallel wrappers.
        batches: at least one, as `micro_batches` makes them.
        finish: see `Finish`.
        vocab_size: number of real tokens.
        temperature: divides the logits.
        group: tensor-parallel ranks.
        trained_only: whether outputs are wanted for the tokens of `loss_mask` alone; those of all
            other tokens are then 0.
        backward: whether to compute gradients.

    Returns:
        What `finish` gave for each micro-batch; empty on ranks that are not on the last stage.
    """

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        micro = next(iterator)
        places = wanted_places(micro, trained_only=trained_only)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            outputs = policy_outputs(
                logits, micro, places, vocab_size=vocab_size, temperature=temperature, group=group
            )
            scalar, value = finish(outputs, micro)
            # Megatron's denominator of a token mean; ours is in the scalar already.
            return scalar, torch.zeros((), dtype=torch.int, device=logits.device), value

        output = model(
            input_ids=micro.tokens,
            position_ids=None,
            attention_mask=None,
            output_processor=partial(_logits, places),
        )
        return output, loss

    rows, length = batches[0].tokens.shape
    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=not backward,
    )
    return collected


def wanted_places(micro: MicroBatch, *, trained_only: bool) -> Tensor:
    """[N] int64: which of the micro-batch's predictions are wanted.

    A place counts through [T - 1, R] row by row; row i predicts token i + 1. Nothing is predicted
    from the last token.
    """
    batch, (rows, length) = micro.batch, micro.tokens.shape
    if trained_only:
        wanted = batch.loss_mask > 0
    else:
        wanted = torch.arange(length, device=batch.lengths.device) < batch.lengths.unsqueeze(1)
    grid = torch.nn.functional.pad(wanted, (0, 0, 0, rows - len(batch))).t()[1:]
    return grid.flatten().nonzero().squeeze(1)


def policy_outputs(
    logits: Tensor,
    micro: MicroBatch,
    places: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: ProcessGroup | None,
) -> PolicyOutputs:
    """What the model says of the micro-batch's real rows.

    Args:
        logits: [N, 1, V / tp], of the wanted places.
        micro: the rows.
        places: see `wanted_places`.
        vocab_size, temperature, group: see `vocabulary_log_probs`.
    """
    rows, length = micro.tokens.shape
    targets = micro.tokens.t()[1:].flatten()[places].unsqueeze(1)
    log_probs, entropy = vocabulary_log_probs(
        logits, targets, vocab_size=vocab_size, temperature=temperature, group=group
    )

    def shape(values: Tensor) -> Tensor:
        grid = values.new_zeros((length - 1) * rows).index_put((places,), values.squeeze(1))
        return torch.nn.functional.pad(
            grid.unflatten(0, (length - 1, rows))[:, : len(micro.batch)].t(), (1, 0)
        )

    return PolicyOutputs(log_probs=shape(log_probs), entropy=shape(entropy))


def _logits(
    places: Tensor,
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    **_rest: Any,
) -> Tensor:
    """[N, 1, V / tp], of the wanted places."""
    wanted = hidden_states[:-1].flatten(0, 1).index_select(0, places).unsqueeze(1)
    logits: Tensor = output_layer(wanted, weight=output_weight, runtime_gather_output=False)[0]
    return logits


def freeze(model: GPTModel) -> GPTModel:
    """The model without gradients, for a reference."""
    return model.requires_grad_(False).eval()
