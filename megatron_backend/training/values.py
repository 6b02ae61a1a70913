"""What a model with a value head says of a micro-batch: values of trained tokens, and scores.

The value of token i is read where the token is predicted, at the slot of token i - 1. The score of
a row is read at its last token, whether that is trained or not.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from algorithms.batch import ValueOutputs
from megatron_backend.training.forward import States, in_rows, trained_places
from megatron_backend.training.log_probs import Vocabulary
from megatron_backend.training.micro_batch import MicroBatch


def read_values(states: States, micro: MicroBatch, _vocabulary: Vocabulary) -> ValueOutputs:
    """Whole on every context-parallel rank, and on every tensor-parallel one."""
    slots, tokens = trained_places(micro)
    ends, lasts = last_places(micro)
    numbers = _numbers_at(states, torch.cat([slots, ends]))
    scores = in_rows(numbers[len(slots) :], lasts, micro)
    last = (micro.batch.lengths - 1).unsqueeze(1)
    return ValueOutputs(
        values=in_rows(numbers[: len(slots)], tokens, micro),
        scores=scores.gather(1, last).squeeze(1),
    )


def read_scores(states: States, micro: MicroBatch, vocabulary: Vocabulary) -> tuple[Tensor]:
    """[B] scores alone, of a model that is only read."""
    return (read_values(states, micro, vocabulary).scores,)


def last_places(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """(slots, tokens), both [N] int64: which of this rank's slots hold the last token of a row, and
    which token that is, as an index into the flattened batch. Slots count as `Stream.source` does.
    """
    source, width = micro.stream.source, micro.batch.tokens.shape[1]
    if not len(micro.batch):
        return source[:0], source[:0]
    rows, columns = source // width, source % width
    last = micro.batch.lengths[rows.clamp(min=0)] - 1
    slots = ((source >= 0) & (columns == last)).nonzero().squeeze(1)
    return slots, source[slots]


def _numbers_at(states: States, slots: Tensor) -> Tensor:
    """[N] float32, what the head says at some slots; the same on all tensor-parallel ranks.

    Where the sequence is split over them, each reads its own slots, and gradients flow on each
    through these only.
    """
    hidden = states.hidden.flatten(0, 1)
    if not states.config.sequence_parallel:
        numbers: Tensor = states.output_layer(hidden.index_select(0, slots))
        return numbers
    group = parallel_state.get_tensor_model_parallel_group()
    local = slots - group.rank() * len(hidden)
    here = ((local >= 0) & (local < len(hidden))).nonzero().squeeze(1)
    own = states.output_layer(hidden.index_select(0, local[here]))
    whole = own.new_zeros(len(slots)).index_copy(0, here, own)
    return reduce_from_tensor_model_parallel_region(whole, group=group)
