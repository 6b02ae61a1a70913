"""The contract that the service, the CLI and the workers share. Free of torch and Ray."""

from service.spec.algorithm import AlgorithmSpec, DynamicSampling, algorithm_specs
from service.spec.algorithms.distillation import DistillationSpec
from service.spec.algorithms.group_relative import (
    CispoSpec,
    DapoSpec,
    DrGrpoSpec,
    GrpoSpec,
    GspoSpec,
)
from service.spec.algorithms.policy_gradient import (
    GroupSpec,
    OverlongPenalty,
    PolicyGradientSpec,
    RolloutCorrection,
)
from service.spec.algorithms.ppo import AdaptiveKl, FixedKl, PpoSpec
from service.spec.algorithms.preference import (
    DpoSpec,
    KtoSpec,
    OrpoSpec,
    RewardModelSpec,
    SimpoSpec,
)
from service.spec.algorithms.reinforce import ReinforcePlusPlusSpec, RemaxSpec, RlooSpec
from service.spec.algorithms.sft import SftSpec
from service.spec.attempt import (
    EventBatch,
    JobContext,
    Outcome,
    Reason,
    ResolvedModel,
    ResumedCheckpoint,
    WorkerEvent,
)
from service.spec.faults import DeadlineSpec, FaultSpec
from service.spec.job import JobSpec
from service.spec.other_models import (
    CriticSpec,
    FrozenLayout,
    FrozenModelSpec,
    RewardSpec,
    Role,
)
from service.spec.parts import (
    BestSpec,
    CheckpointSpec,
    DataSpec,
    EnvironmentRef,
    EvaluationSpec,
    Fp8Spec,
    InitialModel,
    ModelSource,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    ResumeSpec,
    RolloutLayout,
    RolloutSpec,
    TrainingSpec,
)
from service.spec.resources import (
    KubernetesSpec,
    ResourceSpec,
    RetrySpec,
    SlurmSpec,
    TolerationSpec,
)

__all__ = [
    "AdaptiveKl",
    "AlgorithmSpec",
    "BestSpec",
    "CheckpointSpec",
    "CispoSpec",
    "CriticSpec",
    "DapoSpec",
    "DataSpec",
    "DeadlineSpec",
    "DistillationSpec",
    "DpoSpec",
    "DrGrpoSpec",
    "DynamicSampling",
    "EnvironmentRef",
    "EvaluationSpec",
    "EventBatch",
    "FaultSpec",
    "FixedKl",
    "Fp8Spec",
    "FrozenLayout",
    "FrozenModelSpec",
    "GroupSpec",
    "GrpoSpec",
    "GspoSpec",
    "InitialModel",
    "JobContext",
    "JobSpec",
    "KtoSpec",
    "KubernetesSpec",
    "ModelSource",
    "OptimizerSpec",
    "OrpoSpec",
    "Outcome",
    "OverlongPenalty",
    "ParallelSpec",
    "PolicyGradientSpec",
    "PpoSpec",
    "PrecisionSpec",
    "Reason",
    "ReinforcePlusPlusSpec",
    "RemaxSpec",
    "ResolvedModel",
    "ResourceSpec",
    "ResumeSpec",
    "ResumedCheckpoint",
    "RetrySpec",
    "RewardModelSpec",
    "RewardSpec",
    "RlooSpec",
    "Role",
    "RolloutCorrection",
    "RolloutLayout",
    "RolloutSpec",
    "SftSpec",
    "SimpoSpec",
    "SlurmSpec",
    "TolerationSpec",
    "TrainingSpec",
    "WorkerEvent",
    "algorithm_specs",
]
