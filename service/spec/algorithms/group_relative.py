"""Algorithms whose advantage is relative to a group, and whose loss is a bounded ratio."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from service.spec.algorithm import DynamicSampling
from service.spec.algorithms.aggregation import LossAggregation
from service.spec.algorithms.policy_gradient import ClipHigh, ClipLow, GroupSpec


class GrpoSpec(GroupSpec):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    implementation: ClassVar[str] = "algorithms.grpo:Grpo"
    summary: ClassVar[str] = "Group-relative advantages, clipped token ratio, KL to a reference"

    clip_low: ClipLow = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1, le=1000)] | None = None
    """With a negative advantage, the ratio counts at most so much (arXiv 1912.09729); null sets no
    bound."""
    normalize_by_std: bool = True
    """Divide a group's centred rewards by their sample standard deviation (n - 1)."""


class DrGrpoSpec(GroupSpec):
    """GRPO done right (arXiv 2503.20783): no division by deviation or by an answer's length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    implementation: ClassVar[str] = "algorithms.dr_grpo:DrGrpo"
    summary: ClassVar[str] = "GRPO without its biases by length and by difficulty"

    clip_low: ClipLow = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    loss_aggregation: LossAggregation = "seq-mean-token-sum-norm"
    """How token losses become one number; the paper divides by a constant."""
    length_constant: Annotated[int, Field(ge=1, le=10_000_000)] | None = 1024
    """What each sequence's sum is divided by; set it to the most tokens of an episode that the
    policy may write."""


class GspoSpec(GroupSpec):
    """Group Sequence Policy Optimization (arXiv 2507.18071): one ratio a sequence."""

    type: Literal["gspo"] = "gspo"
    implementation: ClassVar[str] = "algorithms.gspo:Gspo"
    summary: ClassVar[str] = "Group-relative advantages, clipped sequence ratio"

    clip_low: ClipLow = 3e-4
    """The sequence's ratio is clipped below at 1 - clip_low."""
    clip_high: ClipHigh = 4e-4
    """The sequence's ratio is clipped above at 1 + clip_high."""
    token_level: bool = False
    """GSPO-token (eq. 14): the sequence's ratio as a value, each token's own gradient."""
    normalize_by_std: bool = True
    """Divide a group's centred rewards by their sample standard deviation (n - 1)."""
    loss_aggregation: LossAggregation = "seq-mean-token-mean"
    """How token losses become one number; the paper takes the mean over sequences."""


class DapoSpec(GroupSpec):
    """Decoupled clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    implementation: ClassVar[str] = "algorithms.dapo:Dapo"
    summary: ClassVar[str] = "GRPO with clip-higher, dynamic sampling and token-level loss"

    clip_low: ClipLow = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: ClipHigh = 0.28
    """The ratio is clipped above at 1 + clip_high."""
    dynamic_sampling: DynamicSampling | None = DynamicSampling()
    """Replaces questions whose answers all have the same reward; null trains on all."""


class CispoSpec(GroupSpec):
    """Clipped Importance-Sampling Policy Optimization (MiniMax-M1, arXiv 2506.13585).

    The ratio is a bounded weight without gradient, so no token is left out of it.
    """

    type: Literal["cispo"] = "cispo"
    implementation: ClassVar[str] = "algorithms.cispo:Cispo"
    summary: ClassVar[str] = "REINFORCE with bounded importance weights"

    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight is at least 1 - clip_low; 1 sets no bound."""
    clip_high: Annotated[float, Field(gt=0, le=100)] = 4.0
    """The weight is at most 1 + clip_high."""
    normalize_by_std: bool = True
    """Divide a group's centred rewards by their sample standard deviation (n - 1)."""
