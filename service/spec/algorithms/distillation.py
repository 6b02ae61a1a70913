"""On-policy distillation."""

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from service.spec.algorithm import AlgorithmSpec
from service.spec.algorithms.aggregation import TokenAggregation
from service.spec.other_models import FrozenModelSpec

Divergence = Literal["forward-kl", "reverse-kl", "js"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


class DistillationSpec(AlgorithmSpec):
    """On-policy distillation (GKD, arXiv 2306.13649): the teacher's distributions at every token
    that the student wrote."""

    type: Literal["distillation"] = "distillation"
    implementation: ClassVar[str] = "algorithms.distillation:Distillation"
    online: ClassVar[bool] = True
    learns_from_rewards: ClassVar[bool] = False
    summary: ClassVar[str] = "A teacher's distributions on the student's own samples"

    teacher_model: FrozenModelSpec
    """The teacher; it must have the student's vocabulary."""
    divergence: Divergence = "reverse-kl"
    """KL(teacher || student), KL(student || teacher), or the generalised Jensen-Shannon one."""
    js_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of `js` (eq. 1 of the paper)."""
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """The teacher's likeliest tokens that are told apart; all others count as one."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples per question."""
    loss_aggregation: TokenAggregation = "token-mean"
    """How token losses become one number; `token-mean` divides by all trained tokens of a step."""

    @property
    def comparable_loss(self) -> bool:
        return True

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size

    @property
    def teacher(self) -> FrozenModelSpec | None:
        return self.teacher_model
