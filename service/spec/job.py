"""JobSpec: the one document that is the REST body, the YAML file, the CLI's input and the worker's.

What one document can tell about itself is checked here. What needs the model's config, the files
or the registry is checked by `service.validation`, at submit as well.
"""

from pydantic import Field, model_validator

from service.spec.algorithm import AlgorithmField
from service.spec.base import JobName, SpecModel
from service.spec.faults import FaultSpec
from service.spec.other_models import FrozenModelSpec, RewardSpec, Role
from service.spec.parts import (
    CheckpointSpec,
    DataSpec,
    EnvironmentRef,
    EvaluationSpec,
    ModelSource,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    ResumeSpec,
    RolloutSpec,
    TrainingSpec,
)
from service.spec.resources import ResourceSpec, RetrySpec


class JobSpec(SpecModel):
    """One post-training job, whole: the same document gives the same job again."""

    name: JobName
    """A DNS label: lower-case letters, digits and dashes, at most 63."""
    model: ModelSource
    """Where the weights come from."""
    algorithm: AlgorithmField
    """The algorithm and its hyperparameters."""
    environment: EnvironmentRef | None = None
    """Where an online algorithm samples and is rewarded."""
    data: DataSpec | None = None
    """What an offline algorithm trains on."""
    rollout: RolloutSpec = RolloutSpec()
    """Sampling."""
    reward: RewardSpec = RewardSpec()
    """What an episode of an online algorithm is worth."""
    parallel: ParallelSpec = ParallelSpec()
    """Layout of training."""
    precision: PrecisionSpec = PrecisionSpec()
    """Number formats."""
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    """Optimizer and learning-rate schedule."""
    training: TrainingSpec = TrainingSpec()
    """Steps and batches."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints and the final export."""
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    """Held-out evaluation."""
    resources: ResourceSpec = ResourceSpec()
    """Machines and limits."""
    retry: RetrySpec = RetrySpec()
    """Retry budgets."""
    faults: FaultSpec = FaultSpec()
    """Dead, hung and diverging ranks."""
    resume: ResumeSpec | None = None
    """Go on with another job's state, under any `parallel`; null starts from `model`."""

    @model_validator(mode="after")
    def _source_of_data(self) -> "JobSpec":
        kind = self.algorithm.type
        if self.algorithm.online:
            if self.environment is None:
                raise ValueError(f"`environment` is needed: {kind} samples from one")
            if self.data is not None:
                raise ValueError(f"`data` has no use: {kind} trains on its own samples")
            if self.training.steps is None:
                raise ValueError(f"`training.steps` is needed: {kind} has no epochs")
            if self.reward != RewardSpec() and not self.algorithm.learns_from_rewards:
                raise ValueError(f"`reward` has no use: {kind} does not learn from rewards")
        elif self.data is None:
            raise ValueError(f"`data` is needed: {kind} trains on rows")
        elif self.reward != RewardSpec():
            raise ValueError(f"`reward` has no use: {kind} trains on rows")
        return self

    @model_validator(mode="after")
    def _something_to_earn(self) -> "JobSpec":
        if not self.algorithm.online or self.reward.environment_weight > 0:
            return self
        if self.reward.model is None or self.reward.model_weight == 0:
            raise ValueError(
                "`reward.environment_weight` must be above 0: without `reward.model` nothing else "
                "is earned, nor where `reward.model_weight` is 0"
            )
        if self.algorithm.resampling is not None:
            raise ValueError(
                "`algorithm.dynamic_sampling` must be null: it goes by the environment's reward, "
                "which has no weight (`reward.environment_weight`)"
            )
        return self

    @model_validator(mode="after")
    def _somewhere_to_evaluate(self) -> "JobSpec":
        if self.evaluation.items and self.evaluation_environment is None:
            raise ValueError("`evaluation.items` needs `evaluation.environment` or `environment`")
        if self.evaluation.items and self.algorithm.head == "value":
            raise ValueError(
                f"`evaluation.items` must be 0: a model of {self.algorithm.type} gives numbers and "
                "writes no answers; its loss on `data.validation` is measured"
            )
        return self

    @property
    def evaluation_environment(self) -> EnvironmentRef | None:
        """The environment that evaluations use."""
        return self.evaluation.environment or self.environment

    @property
    def samples(self) -> bool:
        """True where the job generates: to learn from it, or to be evaluated."""
        return self.algorithm.online or self.evaluation.items > 0

    @property
    def critic_optimizer(self) -> OptimizerSpec | None:
        """How the critic learns: as the policy, at a rate of its own; null without a critic."""
        critic = self.algorithm.critic
        if critic is None:
            return None
        return self.optimizer.model_copy(update={"learning_rate": critic.learning_rate})

    @property
    def frozen_models(self) -> dict[Role, tuple[str, FrozenModelSpec]]:
        """Models that only read, with ranks of their own: for each role its field, and it."""
        found: dict[Role, tuple[str, FrozenModelSpec]] = {}
        if self.algorithm.teacher is not None:
            found["teacher"] = ("algorithm.teacher_model", self.algorithm.teacher)
        if self.reward.model is not None:
            found["reward"] = ("reward.model", self.reward.model)
        return found

    @property
    def other_models(self) -> dict[Role, tuple[str, ModelSource]]:
        """Models beside `model`: for each role, the field that names its weights, and these."""
        found: dict[Role, tuple[str, ModelSource]] = {}
        critic = self.algorithm.critic
        if critic is not None and critic.source is not None:
            found["critic"] = ("algorithm.value_model.source", critic.source)
        for role, (field, model) in self.frozen_models.items():
            found[role] = (f"{field}.source", model.source)
        return found
