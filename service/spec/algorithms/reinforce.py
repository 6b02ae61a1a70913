"""Algorithms that weigh an answer's log-probability by its reward less a baseline."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from service.spec.algorithms.aggregation import LossAggregation
from service.spec.algorithms.policy_gradient import (
    ClipHigh,
    ClipLow,
    GroupSpec,
    KlEstimator,
    PolicyGradientSpec,
)


class RlooSpec(GroupSpec):
    """REINFORCE Leave-One-Out (arXiv 2402.14740): the baseline is the mean of the other answers."""

    type: Literal["rloo"] = "rloo"
    implementation: ClassVar[str] = "algorithms.rloo:Rloo"
    summary: ClassVar[str] = "REINFORCE against the mean of the other answers"

    ratio: Literal["sequence", "token"] = "sequence"
    """One importance ratio an answer, as an answer is one action in the paper, or one a token."""
    clip_low: ClipLow = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    kl_estimator: KlEstimator = "k1"
    """The paper's estimate."""
    kl_in: Literal["loss", "reward"] = "reward"
    """The paper takes it off the reward, before the baseline."""
    loss_aggregation: LossAggregation = "seq-mean-token-sum"
    """How token losses become one number; with `ratio: sequence` an answer has one loss, and this
    must be `seq-mean-token-sum`."""

    @model_validator(mode="after")
    def _one_loss_an_answer(self) -> "RlooSpec":
        if self.ratio == "sequence" and self.loss_aggregation != "seq-mean-token-sum":
            raise ValueError("`loss_aggregation` must be seq-mean-token-sum with ratio sequence")
        return self


class ReinforcePlusPlusSpec(PolicyGradientSpec):
    """REINFORCE++ (arXiv 2501.03262): no critic, KL in the reward, advantages normalised over the
    whole batch."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    implementation: ClassVar[str] = "algorithms.reinforce_plus_plus:ReinforcePlusPlus"
    summary: ClassVar[str] = "REINFORCE with KL in the reward, normalised over the batch"

    baseline: Literal["none", "group"] = "none"
    """`group` takes the mean reward of the question's answers off first (REINFORCE++-baseline)."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples per question; at least 2 with a group baseline."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of later rewards, per token."""
    clip_low: ClipLow = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    kl_estimator: KlEstimator = "k1"
    """The paper's estimate."""
    kl_in: Literal["loss", "reward"] = "reward"
    """The paper takes it off each token's reward."""

    @model_validator(mode="after")
    def _a_group_for_the_baseline(self) -> "ReinforcePlusPlusSpec":
        if self.baseline == "group" and self.group_size < 2:
            raise ValueError("`group_size` must be at least 2: a group baseline needs a group")
        return self

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size


class RemaxSpec(PolicyGradientSpec):
    """ReMax (arXiv 2310.10505): the baseline is the reward of the greedy answer."""

    type: Literal["remax"] = "remax"
    implementation: ClassVar[str] = "algorithms.remax:Remax"
    summary: ClassVar[str] = "REINFORCE against the greedy answer's reward"
    greedy_baseline: ClassVar[bool] = True

    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples per question, beside the greedy one."""
    kl_estimator: KlEstimator = "k1"
    """The paper's estimate."""
    kl_in: Literal["loss", "reward"] = "reward"
    """The paper takes it off the reward."""
    loss_aggregation: LossAggregation = "seq-mean-token-sum"
    """How token losses become one number; the paper sums over an answer (eq. 4)."""

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size
