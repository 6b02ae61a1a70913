"""What the ranks do in tests of the output layer: how many tokens go through it, and how large
anything becomes on the way."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms.batch import Batch, Normalizer
from service.spec import GrpoSpec
from service.spec.layout import Layout
from tests.megatron_backend.training.training_runs import LEARNING_RATE, build_trainer

GRPO = GrpoSpec(kl_coef=0.1, updates_per_rollout=2)


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def count_rows(
    _rank: int, layout: Layout, batch: Batch, ways: Sequence[dict[str, Any]]
) -> list[tuple[int, int]]:
    """Rows of hidden states that met the output layer: in a step, and where log-probs are read."""
    from megatron_backend.training import forward

    real, rows = forward.linear_log_probs, 0

    def counting(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        nonlocal rows
        rows += len(hidden)
        return real(hidden, *rest)

    counts = []
    with mock.patch.object(forward, "linear_log_probs", counting):
        for way in ways:
            trainer = build_trainer("qwen2-tied", layout, GRPO, num_hidden_layers=4, **way)
            rows = 0
            trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
            in_step, rows = rows, 0
            trainer.log_probs(batch)
            counts.append((in_step, rows))
    return counts


def find_places(
    _rank: int, batches: Sequence[Batch], layout: Layout, packing: bool
) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """Of each batch and context-parallel rank: slots, tokens, and what stands in all slots."""
    from megatron_backend.training.forward import trained_places
    from megatron_backend.training.micro_batch import MicroBatch
    from megatron_backend.training.sequence import Cut, lay_out

    found = []
    for batch in batches:
        cuts = [Cut.of(layout, packing=packing, cp_rank=rank) for rank in range(layout.cp)]
        micros = [MicroBatch(batch=batch, rows=[], stream=lay_out(batch, cut)) for cut in cuts]
        found.append([(*trained_places(micro), micro.stream.source) for micro in micros])
    return found


def largest_of_a_step(
    _rank: int, layout: Layout, batch: Batch, vocab: int, rows: int | None, packing: bool
) -> tuple[int, int]:
    """Elements of the largest tensor that a step makes, and of the model's parameters here.

    Args:
        rows: tokens of a chunk of logits; None leaves chunks as large as they usually are.
    """
    from megatron_backend.training import log_probs

    trainer = build_trainer(
        "qwen2-tied", layout, GRPO, vocab_size=vocab, num_hidden_layers=2, packing=packing
    )
    chunk = log_probs.CHUNK_BYTES if rows is None else 4 * rows * vocab // layout.tp
    with (
        mock.patch.object(log_probs, "CHUNK_BYTES", chunk),
        mock.patch.object(log_probs, "_LEAST_ROWS", 1),
        Largest() as found,
    ):
        trainer.train_step(batch, Normalizer.of(batch), learning_rate=LEARNING_RATE)
    held = sum(one.numel() for chunk in trainer.model for one in chunk.parameters())
    return found.elements, held
