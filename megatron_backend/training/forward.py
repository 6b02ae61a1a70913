"""Forward (and backward) of a batch through Megatron's schedules, for any layout."""

from collections.abc import Callable, Iterator, Sequence
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
    model: torch.nn.Module,
    batches: Sequence[MicroBatch],
    finish: Finish,
    *,
    vocab_size: int,
    temperature: float,
    group: ProcessGroup,
    backward: bool,
) -> list[Any]:
    """Runs every micro-batch through the model, and `finish` on the last stage.

    Gradients add up in the model's buffers; `finish`'s scalars are not scaled in any way.

    Args:
        model: a GPTModel, or its data-parallel wrapper.
        batches: at least one, as `micro_batches` makes them.
        finish: see `Finish`.
        vocab_size: number of real tokens.
        temperature: divides the logits.
        group: tensor-parallel ranks.
        backward: whether to compute gradients.

    Returns:
        What `finish` gave for each micro-batch; empty on ranks that are not on the last stage.
    """

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        micro = next(iterator)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            outputs = policy_outputs(
                logits, micro, vocab_size=vocab_size, temperature=temperature, group=group
            )
            scalar, value = finish(outputs, micro)
            # The count is Megatron's denominator of a token mean; ours is in the scalar already.
            return scalar, torch.zeros((), dtype=torch.int, device=logits.device), value

        output = model(
            input_ids=micro.tokens,
            position_ids=None,
            attention_mask=None,
            output_processor=_logits,
        )
        return output, loss

    rows, length = batches[0].tokens.shape
    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=not backward,
    )
    return collected


def policy_outputs(
    logits: Tensor,
    micro: MicroBatch,
    *,
    vocab_size: int,
    temperature: float,
    group: ProcessGroup | None,
) -> PolicyOutputs:
    """What the model says of the micro-batch's real rows.

    Args:
        logits: [T - 1, R, V / tp]; row i speaks of token i + 1.
        micro: the rows.
        vocab_size, temperature, group: see `vocabulary_log_probs`.
    """
    rows = len(micro.batch)
    targets = micro.tokens.t()[1:]
    log_probs, entropy = vocabulary_log_probs(
        logits, targets, vocab_size=vocab_size, temperature=temperature, group=group
    )
    positions = torch.arange(1, micro.tokens.shape[1], device=logits.device).unsqueeze(1)
    real = (positions < micro.batch.lengths)[:, :rows]

    def shape(values: Tensor) -> Tensor:
        kept = torch.where(real, values[:, :rows], 0.0)
        return torch.nn.functional.pad(kept.t(), (1, 0))

    return PolicyOutputs(log_probs=shape(log_probs), entropy=shape(entropy))


def _logits(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    **_rest: Any,
) -> Tensor:
    """[T - 1, R, V / tp]: nothing is predicted from the last token, so it is left out. Megatron's
    own way would copy the logits to put the batch first."""
    logits: Tensor = output_layer(
        hidden_states[:-1], weight=output_weight, runtime_gather_output=False
    )[0]
    return logits


def freeze(model: GPTModel) -> GPTModel:
    """The model without gradients, for a reference."""
    return model.requires_grad_(False).eval()
