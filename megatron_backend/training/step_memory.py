"""What a step moves besides the weights, long before it is known whether the step is taken.

Each pass in FP8 with delayed scaling writes down the maxima that it saw and makes new scales of
them, and each gradient in fp16 moves the loss scale or counts towards its growth. A step that is
refused must have moved neither: its maxima may be infinite, and would be remembered for as many
steps as the history is long, and the same step run again must be the same to the bit.

Transformer Engine's own memory, on a GPU, is not put back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from torch import Tensor

from megatron_backend.fp8_emulation import DelayedRounding, delayed_roundings
from megatron_backend.training.optimizer import loss_scalers


@dataclass(frozen=True, slots=True)
class StepMemory:
    """That memory as it was at one moment, on one rank."""

    _roundings: Sequence[tuple[DelayedRounding, Tensor]]
    _scalers: Sequence[tuple[MegatronGradScaler, dict[str, Any]]]

    @classmethod
    def of(cls, model: Sequence[GPTModel], optimizer: MegatronOptimizer) -> Self:
        """As it is now."""
        roundings = [rounding for chunk in model for rounding in delayed_roundings(chunk)]
        return cls(
            [(rounding, rounding.memory) for rounding in roundings],
            [(scaler, scaler.state_dict()) for scaler in loss_scalers(optimizer)],
        )

    def forget_passes(self) -> None:
        """Makes FP8's part what it was then."""
        for rounding, memory in self._roundings:
            rounding.remember(memory)

    def put_back(self) -> None:
        """Makes all of it what it was then."""
        self.forget_passes()
        for scaler, state in self._scalers:
            scaler.load_state_dict(state)
