"""Proximal Policy Optimization."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from service.spec.algorithms.policy_gradient import (
    ClipHigh,
    ClipLow,
    KlEstimator,
    PolicyGradientSpec,
)
from service.spec.base import SpecModel
from service.spec.other_models import CriticSpec


class FixedKl(SpecModel):
    """`kl_coef` stays what it is."""

    type: Literal["fixed"] = "fixed"
    """Which controller."""


class AdaptiveKl(SpecModel):
    """`kl_coef` follows the measured KL (Ziegler et al., arXiv 1909.08593, section 2.2)."""

    type: Literal["adaptive"] = "adaptive"
    """Which controller."""
    target: Annotated[float, Field(gt=0, le=1000)] = 6.0
    """Nats of a whole answer that the KL is steered to."""
    horizon: Annotated[int, Field(ge=1)] = 10_000
    """Answers over which the coefficient can change by a factor of about 1.2."""


class PpoSpec(PolicyGradientSpec):
    """Proximal Policy Optimization (arXiv 1707.06347) with a critic, as in arXiv 2203.02155."""

    type: Literal["ppo"] = "ppo"
    implementation: ClassVar[str] = "algorithms.ppo:Ppo"
    summary: ClassVar[str] = "Clipped ratio, critic, generalised advantages, KL in the reward"

    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples per question."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of later rewards, per token (gamma)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Between one-step errors (0) and whole returns (1) (arXiv 1506.02438)."""
    whiten_advantages: bool = True
    """Bring the batch's advantages to mean 0 and sample standard deviation 1, over tokens."""
    clip_low: ClipLow = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1, le=1000)] | None = None
    """With a negative advantage, the ratio counts at most so much (arXiv 1912.09729); null sets no
    bound."""
    value_clip: Annotated[float, Field(gt=0, le=1000)] | None = 0.2
    """The critic's values count only so far from the old ones; null sets no bound."""
    kl_coef: Annotated[float, Field(ge=0, le=1000)] = 0.05
    """Weight of the KL estimate against the starting model; 0 keeps no reference model."""
    kl_estimator: KlEstimator = "k1"
    """The usual estimate in the reward."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where it goes: off each token's reward, or into the loss."""
    kl_controller: Annotated[FixedKl | AdaptiveKl, Field(discriminator="type")] = FixedKl()
    """Whether `kl_coef` stays, or follows the KL."""
    value_model: CriticSpec = CriticSpec()
    """The critic."""

    @model_validator(mode="after")
    def _something_to_control(self) -> "PpoSpec":
        if self.kl_controller.type == "adaptive" and (self.kl_coef == 0 or self.kl_in == "loss"):
            raise ValueError(
                "`kl_controller` adaptive needs `kl_in: reward` and a `kl_coef` above 0: it steers "
                "the weight of the KL in the reward, and multiplies it"
            )
        return self

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size

    @property
    def critic(self) -> CriticSpec | None:
        return self.value_model
