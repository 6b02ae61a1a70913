"""What a model says of a batch, read without gradient, in any layout.

As in training every rank gets the whole batch, takes its own rows, and answers for them only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from algorithms.batch import Batch
from megatron_backend.runtime.distributed import device
from megatron_backend.training import forward
from megatron_backend.training.micro_batch import (
    Limits,
    MicroBatch,
    micro_batches,
    plan_micro_batches,
)
from megatron_backend.training.sequence import Cut
from megatron_backend.training.shares import RowShare
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig


class Reader:
    """One rank's part of a model that is only read.

    Args:
        model: this rank's chunks; they are frozen.
        config: of the model.
        layout: of all ranks.
        vocab_size: number of tokens that it tells apart; at most the config's.
        temperature: divides the logits.
        micro_batch_size: rows of a micro-batch; None lets tokens decide.
        micro_batch_tokens: tokens of a micro-batch at most.
        packing: rows lie end to end instead of padded.
    """

    def __init__(
        self,
        model: Sequence[GPTModel],
        config: ModelConfig,
        layout: Layout,
        *,
        vocab_size: int,
        temperature: float,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int = 16384,
        packing: bool = True,
    ) -> None:
        self._model = [forward.freeze(chunk) for chunk in model]
        self._layout, self._temperature = layout, temperature
        self._vocab_size, self._softcap = vocab_size, config.final_softcap
        self._rank = layout.coordinates(torch.distributed.get_rank())
        self._cut = Cut.of(layout, packing=packing, cp_rank=self._rank.cp)
        self._limits = Limits.of(layout, tokens=micro_batch_tokens, rows=micro_batch_size)

    @torch.no_grad()
    def read(self, batch: Batch, read: forward.Read) -> list[RowShare] | None:
        """Every rank must call it.

        Args:
            batch: the whole batch, the same on every rank.
            read: gives tensors of a micro-batch's rows: [rows, T, ...], or [rows].

        Returns:
            This rank's rows of each of these tensors, [rows, T, ...] with 0 behind each row's end,
            or [rows]. None on ranks that another one speaks for.
        """
        plan = plan_micro_batches(
            batch.lengths.tolist(),
            ranks=self._layout.dp,
            limits=self._limits,
            packing=self._cut.packing,
            factor=self._cut.row_factor,
        )
        batches = micro_batches(batch, plan[self._rank.dp], self._cut, device=device())
        collected = forward.run(
            self._model,
            batches,
            _collect,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            softcap=self._softcap,
            backward=False,
            read=read,
        )
        if self._rank.tp or self._rank.cp or self._rank.pp < self._layout.pp - 1:
            return None
        rows = [row for micro in batches for row in micro.rows]
        return [
            RowShare(rows=rows, values=joined(pieces, batch.tokens.shape[1]).numpy())
            for pieces in zip(*collected, strict=True)
        ]


def _collect(outputs: tuple[Tensor, ...], _micro: MicroBatch) -> tuple[Tensor, Any]:
    """There is nothing to go backward from."""
    return torch.zeros((), device=outputs[0].device), [tensor.cpu() for tensor in outputs]


def joined(pieces: Sequence[Tensor], length: int) -> Tensor:
    """[rows, length, ...] from [rows, T, ...] of each micro-batch, or [rows] from [rows]."""
    if pieces[0].dim() == 1:
        return torch.cat(list(pieces))
    padding = [(0, 0) * (piece.dim() - 2) + (0, length - piece.shape[1]) for piece in pieces]
    return torch.cat(
        [torch.nn.functional.pad(piece, pad) for piece, pad in zip(pieces, padding, strict=True)]
    )
