"""What the API answers of a plan, as models."""

from typing import Any, Literal

from service.api.resources import Layout, Resource
from service.spec import FrozenLayout, JobSpec, Role


class RankMemory(Resource):
    """Bytes that one rank of a pipeline stage takes, by formula."""

    pp_rank: int
    parameters: int
    """How many parameters it holds."""
    weights: int
    gradients: int
    optimizer: int
    rollout_weights: int
    """The sampling copy."""
    reference_weights: int
    """The model as the job started, which a KL term or a preference compares with."""
    critic: int
    """Weights, gradients and optimizer state of the critic."""
    activations: int
    """What the forward passes of a step leave for its backward passes, at their worst moment."""
    logits: int
    """Chunks of logits and the output layer's gradient; on the last stage only."""
    packed_weights: int
    """The sampling copy's matrices once more, while it samples on a CPU in fp32."""
    kv_cache: int
    """Keys and values of all sequences that the rank samples, at full length."""
    total: int
    """At the worst moment; without the context and workspaces of libraries."""


class FrozenRankMemory(Resource):
    """Bytes that one rank of a model takes that only reads, by formula."""

    pp_rank: int
    parameters: int
    """How many parameters it holds."""
    weights: int
    activations: int
    """Of one forward pass."""
    logits: int
    """Chunks of logits; none for a reward model."""
    total: int
    """At the worst moment; without the context and workspaces of libraries."""


class FrozenGroup(Resource):
    """The ranks of a teacher or a reward model, beside those of training."""

    role: Role
    layout: FrozenLayout
    world_size: int
    """Number of ranks, tp x pp x dp; each takes a GPU where the job uses GPUs."""
    parameters: int
    """Parameters of the model."""
    memory_per_rank: list[FrozenRankMemory]
    """One rank of each pipeline stage, first to last."""


class Proposal(Resource):
    """A layout in which a job fits into the memory of given GPUs."""

    layout: Layout
    changes: dict[str, dict[str, Any]]
    """What to write into the job: `parallel`, `training`, `optimizer`, `resources`."""
    memory: RankMemory
    """Of a rank in the fullest stage."""
    relative_time: float
    """Of a step, on paper; 1 is a step of nothing but the products, spread over all GPUs."""
    reason: str
    """What the layout costs, and how full the GPUs are."""


class SubmissionText(Resource):
    """What a launcher would hand to its cluster, for people to read."""

    kind: Literal["sbatch", "rayjob", "ray_job"]
    text: str
    """The batch script, the manifest as YAML, or the body of the request as JSON."""


class Plan(Resource):
    """What a job would become."""

    object: Literal["job.plan"] = "job.plan"
    spec: JobSpec
    """With all defaults, and with versions and checkpoints pinned."""
    layout: Layout
    micro_batch_size: int | None
    """Sequences of one forward pass on one rank; null where `auto` decides at each step."""
    micro_batches: int | None
    """Forward passes of one rank in one optimizer step; null as well."""
    parameters: int
    """Parameters of the model."""
    memory_per_rank: list[RankMemory]
    """One rank of each pipeline stage, first to last."""
    groups: list[FrozenGroup]
    """Models with ranks of their own."""
    padded_vocabulary: int
    """Rows of embedding and output layer in this layout."""
    padding_factor: int
    """Lengths are padded to multiples of it: a whole batch's where sequences are packed."""
    notes: list[str]
    """What is worth knowing before it starts."""
    submission: SubmissionText | None = None
    """What its cluster would be handed; null on this machine."""
    proposals: list[Proposal] | None = None
    """Layouts that fit, fastest first; null where no memory was given."""
