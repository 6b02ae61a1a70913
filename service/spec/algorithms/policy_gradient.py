"""What all algorithms have in common that learn from rewards on the policy's own samples."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from service.spec.algorithm import AlgorithmSpec, DynamicSampling
from service.spec.algorithms.aggregation import LossAggregation
from service.spec.base import SpecModel

KlEstimator = Literal["k1", "k2", "k3"]
ClipLow = Annotated[float, Field(gt=0, lt=1)]
ClipHigh = Annotated[float, Field(gt=0, le=10)]
GroupSize = Annotated[int, Field(ge=2, le=1024)]


class RolloutCorrection(SpecModel):
    """Importance sampling from the generator's distribution to the trainer's.

    The weight is p_old / p_rollout, with p_old by the training model before the first update.
    """

    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or one for a sequence: the product of its tokens' ratios."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Weights above `high` (below `low`) are set to it, or what has them is not trained."""
    low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lower bound of the weight."""
    high: Annotated[float, Field(gt=1, le=1000)] = 2.0
    """Upper bound of the weight."""


class OverlongPenalty(SpecModel):
    """A reward for length, below 0 near the bound (DAPO, arXiv 2503.14476, eq. 13)."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Tokens of the policy in an episode from which on the penalty is whole (L_max)."""
    buffer_tokens: Annotated[int, Field(ge=1)]
    """Over how many tokens before that it grows from 0 (L_cache)."""
    penalty: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its size."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "OverlongPenalty":
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("`buffer_tokens` must be at most `max_tokens`")
        return self


class PolicyGradientSpec(AlgorithmSpec):
    """Fields of every algorithm that learns from rewards."""

    online: ClassVar[bool] = True

    updates_per_rollout: Annotated[int, Field(ge=1, le=64)] = 1
    """Passes over each batch of samples."""
    mini_batches: Annotated[int, Field(ge=1, le=1024)] = 1
    """Optimizer steps of one pass: the batch is dealt into so many parts, in a random order."""
    kl_coef: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the KL estimate against the starting model; 0 keeps no reference model."""
    kl_estimator: KlEstimator = "k3"
    """k1 = log p/q, k2 = k1^2 / 2, k3 = q/p - 1 + log p/q (J. Schulman, 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it goes: into the loss, with its gradient, or off each token's reward."""
    entropy_coef: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the policy's entropy, which is added to what is maximised."""
    loss_aggregation: LossAggregation = "token-mean"
    """How token losses become one number; `token-mean` divides by all trained tokens of a step."""
    length_constant: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """What `seq-mean-token-sum-norm` divides each sequence's sum by, as the most tokens of an
    episode that the policy may write."""
    rollout_correction: RolloutCorrection | None = None
    """Weighs samples by how much likelier the trainer finds them than the generator did."""
    overlong: OverlongPenalty | None = None
    """Takes from the reward of long episodes."""

    @property
    def steps_per_batch(self) -> int:
        return self.mini_batches

    @property
    def keeps_reference(self) -> bool:
        return self.kl_coef > 0

    @model_validator(mode="after")
    def _constant_where_needed(self) -> "PolicyGradientSpec":
        norm = self.loss_aggregation == "seq-mean-token-sum-norm"
        if norm and self.length_constant is None:
            raise ValueError(
                "`length_constant` is needed: loss_aggregation seq-mean-token-sum-norm divides by "
                "it"
            )
        if not norm and self.length_constant is not None:
            raise ValueError(
                "`length_constant` has no use: only loss_aggregation seq-mean-token-sum-norm "
                "divides by it"
            )
        return self


class GroupSpec(PolicyGradientSpec):
    """Fields of algorithms that measure an answer against others to the same question."""

    group_size: GroupSize = 8
    """Samples per question. A group of one has no advantage, so at least two."""
    dynamic_sampling: DynamicSampling | None = None
    """Replaces questions whose answers all have the same reward; null trains on all."""

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size

    @property
    def resampling(self) -> DynamicSampling | None:
        return self.dynamic_sampling
