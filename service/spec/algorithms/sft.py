"""Supervised fine-tuning."""

from typing import ClassVar, Literal

from service.spec.algorithm import AlgorithmSpec
from service.spec.algorithms.aggregation import TokenAggregation


class SftSpec(AlgorithmSpec):
    """Supervised fine-tuning: cross-entropy on the assistant's tokens."""

    type: Literal["sft"] = "sft"
    implementation: ClassVar[str] = "algorithms.sft:Sft"
    online: ClassVar[bool] = False
    summary: ClassVar[str] = "Supervised fine-tuning on the assistant's tokens"

    loss_aggregation: TokenAggregation = "token-mean"
    """How token losses become one number; `token-mean` divides by all trained tokens of a step."""

    @property
    def comparable_loss(self) -> bool:
        return True
