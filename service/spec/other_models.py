"""Models of a job beside the one that it trains: a critic, a reward model, a teacher."""

from typing import Annotated, Literal

from pydantic import Field

from service.spec.base import SpecModel
from service.spec.parts import ModelSource

Role = Literal["critic", "reward", "teacher"]
"""What a job uses another model for."""


class FrozenLayout(SpecModel):
    """Layout of a model that is not trained; it has ranks of its own."""

    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor parallelism."""
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline parallelism."""
    dp: Annotated[int, Field(ge=1, le=65536)] = 1
    """Copies, which share the rows."""

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.tp * self.pp * self.dp


class FrozenModelSpec(SpecModel):
    """A model that only reads: its weights stay as they are."""

    source: ModelSource
    """Where its weights come from, as a job's `model`."""
    layout: FrozenLayout = FrozenLayout()
    """Its ranks, beside those of training."""


class CriticSpec(SpecModel):
    """A value model: one number for each token. It has the policy's layout, on the same ranks."""

    source: ModelSource | None = None
    """Where its weights come from: a reward model of the policy's architecture is a good start;
    null takes the policy's own, with a new head."""
    learning_rate: Annotated[float, Field(gt=0, lt=10)] = 1e-5
    """Peak learning rate; the schedule is the policy's."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which only the critic learns."""


class RewardSpec(SpecModel):
    """What an episode is worth: a weighted sum."""

    environment_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of the environment's reward (a verifier's, say)."""
    model: FrozenModelSpec | None = None
    """A reward model, as `reward_model` trains it; it scores whole episodes."""
    model_weight: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """Weight of its score, which counts at the episode's last token."""
    unfinished_penalty: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Taken from an episode whose last turn was cut by a bound on its length: it has no stop token.
    """
