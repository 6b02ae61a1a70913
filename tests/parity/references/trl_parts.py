"""What a TRL trainer's own methods need around them: its losses are no free functions.

A trainer is made without its constructor, and a model that returns chosen log-probs stands in for a
language model, so that a loss and its gradient are known at exactly these log-probs.
"""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class OneProcess:
    """The part of an Accelerator that is asked for."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True
    parallelism_config = None

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Any, reduction: str = "sum") -> Any:  # noqa: ARG002
        return value

    def unwrap_model(self, model: Any) -> Any:
        return model


class TokenModel(torch.nn.Module):
    """Says the log-probs [B, T] that it was given, of what the labels do not leave out.

    Where it was given those of mismatched answers, it tells the two calls apart by their tokens.
    """

    is_gradient_checkpointing = False

    def __init__(self, log_probs: Tensor, *, mismatched: Tensor | None = None) -> None:
        super().__init__()
        self.log_probs, self.mismatched = log_probs, mismatched

    def forward(self, **given: Any) -> SimpleNamespace:
        of_mismatched = self.mismatched is not None and int(given["input_ids"][0, 0]) == MISMATCHED
        log_probs = self.mismatched if of_mismatched else self.log_probs
        mask = given["labels"][:, 1:] != -100
        nothing = torch.zeros_like(log_probs)
        return SimpleNamespace(
            log_probs=log_probs * mask,
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
            log_sum_sq_probs=nothing,
            aux_loss=None,
            label_mask=mask,
        )


class _Idle(torch.nn.Module):
    """A trainer asks its own model only whether it is in training."""

    is_gradient_checkpointing = False


MISMATCHED = 2
"""First token of the rows that a mismatched answer stands in."""


def trainer(of: type, **attributes: Any) -> Any:
    """A trainer of that class with these attributes and no others but what all of them need."""
    made = object.__new__(of)
    made.__dict__.update(
        model=_Idle(),
        accelerator=OneProcess(),
        aux_loss_enabled=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _logs=defaultdict(
            deque, rewards=defaultdict(deque), extra=defaultdict(deque), advantages=deque()
        ),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    made.__dict__.update(attributes)
    return made


def arguments(**values: Any) -> SimpleNamespace:
    """The trainer's arguments that are asked for."""
    return SimpleNamespace(gradient_checkpointing_kwargs=None, max_length=None, **values)


def tokens_of(mask: Tensor, *, first: int = 1) -> dict[str, Tensor]:
    """Rows with one prompt token, in the shape of TRL's collators; the mask is the answer's."""
    prompt = torch.zeros(len(mask), 1, dtype=torch.int64)
    completion = torch.cat([prompt, mask.long()], dim=1)
    return {
        "input_ids": torch.full_like(completion, first),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
    }
