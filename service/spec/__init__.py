"""The contract that the service, the CLI and the workers share. Free of torch and Ray."""

from service.spec.algorithm import AlgorithmSpec, GrpoSpec, SftSpec, algorithm_specs
from service.spec.attempt import (
    EventBatch,
    JobContext,
    Outcome,
    Reason,
    ResolvedModel,
    WorkerEvent,
)
from service.spec.job import JobSpec
from service.spec.parts import (
    CheckpointSpec,
    DataSpec,
    EnvironmentRef,
    EvaluationSpec,
    InitialModel,
    ModelSource,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    ResourceSpec,
    RetrySpec,
    RolloutLayout,
    RolloutSpec,
    TrainingSpec,
)

__all__ = [
    "AlgorithmSpec",
    "CheckpointSpec",
    "DataSpec",
    "EnvironmentRef",
    "EvaluationSpec",
    "EventBatch",
    "GrpoSpec",
    "InitialModel",
    "JobContext",
    "JobSpec",
    "ModelSource",
    "OptimizerSpec",
    "Outcome",
    "ParallelSpec",
    "PrecisionSpec",
    "Reason",
    "ResolvedModel",
    "ResourceSpec",
    "RetrySpec",
    "RolloutLayout",
    "RolloutSpec",
    "SftSpec",
    "TrainingSpec",
    "WorkerEvent",
    "algorithm_specs",
]
