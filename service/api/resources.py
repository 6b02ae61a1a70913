"""What the API answers, as models: they make the OpenAPI document, and the client reads them.

Times are seconds since the epoch, UTC. Lists have the envelope of the OpenAI API.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from service.jobs import AttemptState, JobState
from service.spec import FrozenLayout, JobSpec, Reason, Role
from service.spec.algorithm import Head, RowKind


class Resource(BaseModel):
    """What every answer has in common. Unknown fields are let pass: a client may be older."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Listing[Item](Resource):
    """One page of a list."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    """Whether more follow."""
    next: str | None
    """Send it as `after` to get what follows; null on the last page."""


class Layout(Resource):
    """How a job is spread over ranks."""

    tp: int
    pp: int
    dp: int
    """Data parallelism, with `auto` resolved."""
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    pipeline_layers: list[int] | None = None
    """Layers of each stage; null where they are spread evenly."""
    world_size: int
    """Number of ranks, tp x cp x pp x dp."""


class Progress(Resource):
    """How far a job is."""

    step: int
    total_steps: int | None
    phase: str
    """What it is doing: rollout, train, evaluate, ..."""
    fraction: float | None
    """Share of the steps that are done, 0 to 1."""
    remaining_seconds: float | None
    """An estimate from the last steps; null while there is none."""
    updated_at: float


class AttemptResource(Resource):
    """One try at running a job."""

    object: Literal["job.attempt"] = "job.attempt"
    number: int
    """1, 2, ... within the job."""
    state: AttemptState
    launcher: str
    launcher_id: str | None
    created_at: float
    started_at: float | None
    """First sign of life."""
    ended_at: float | None
    exit_code: int | None
    exit_signal: int | None
    reason: Reason | None
    """Why it ended otherwise than well."""
    message: str


class JobSummary(Resource):
    """A job in a list."""

    object: Literal["job"] = "job"
    id: str
    name: str
    algorithm: str
    cluster: str
    state: JobState
    cancel_requested: bool
    reason: Reason | None
    message: str
    """For people, beside `reason`."""
    layout: Layout
    attempt_count: int
    event_count: int
    """Number of the newest event."""
    created_at: float
    updated_at: float

    @property
    def ended(self) -> bool:
        """Whether it has come to its end, well or not."""
        return self.state.terminal


class JobResource(JobSummary):
    """A job."""

    spec: dict[str, Any]
    """The document as it was sent."""
    resolved_spec: dict[str, Any]
    """With all defaults, and with versions and checkpoints pinned: it gives the same job again."""
    attempts: list[AttemptResource]
    """Oldest first."""
    progress: Progress | None
    """Null before the first step."""


class EventResource(Resource):
    """One event of a job."""

    object: Literal["job.event"] = "job.event"
    id: int
    """1, 2, 3, ... within the job, with no gap."""
    job_id: str
    time: float
    attempt: int | None
    """Null for the service's own events."""
    kind: str
    """`state`, or a worker's: started, progress, metrics, checkpoint, evaluation, sample, ..."""
    step: int | None
    data: dict[str, Any]


class LogChunk(Resource):
    """A piece of an attempt's log."""

    object: Literal["job.log"] = "job.log"
    attempt: int
    offset: int
    """Where the piece begins, in bytes."""
    next_offset: int
    """Send it as `after` to get what follows."""
    text: str
    """UTF-8; what is not is shown as U+FFFD."""
    complete: bool
    """The attempt has ended and this is the end of its log."""


class MetricsRow(Resource):
    """The metrics of one step; of a step that was done twice, the newest attempt's."""

    object: Literal["job.metrics"] = "job.metrics"
    step: int
    attempt: int
    time: float
    values: dict[str, float]


class CheckpointResource(Resource):
    """A checkpoint that can be loaded."""

    object: Literal["job.checkpoint"] = "job.checkpoint"
    step: int
    attempt: int
    created_at: float
    bytes: int
    layout: dict[str, Any]
    """`parallel` of the ranks that wrote it, `auto` resolved; any layout can load it."""
    latest: bool
    path: str
    """Folder on the storage of the service."""
    source: str
    """What to write as `model.from` in another job."""


class FileResource(Resource):
    """An uploaded file, shaped as in the OpenAI API."""

    object: Literal["file"] = "file"
    id: str
    filename: str
    """As the user called it: shown, never used as a path."""
    purpose: str
    bytes: int
    sha256: str
    lines: int | None
    """Rows of a training file; null for others."""
    created_at: int
    status: Literal["processed"] = "processed"


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
    groups: list[FrozenGroup] = []
    """Models with ranks of their own."""
    padded_vocabulary: int
    """Rows of embedding and output layer in this layout."""
    padding_factor: int
    """Lengths are padded to multiples of it: a whole batch's where sequences are packed."""
    notes: list[str]
    """What is worth knowing before it starts."""
    proposals: list[Proposal] | None = None
    """Layouts that fit, fastest first; null where no memory was given."""


class AlgorithmResource(Resource):
    """An installed algorithm."""

    object: Literal["algorithm"] = "algorithm"
    type: str
    """As in `algorithm.type` of a job."""
    summary: str
    online: bool
    """The model samples its own training data from an environment."""
    rows: RowKind | None
    """What a row of training data is; null for an online algorithm."""
    head: Head
    """What is trained: a model that writes tokens, or one that gives numbers."""
    documentation: str | None
    """Page of the documentation; null for an algorithm of another package."""
    json_schema: dict[str, Any]
    """JSON schema of `algorithm`."""


class EnvironmentResource(Resource):
    """An installed environment."""

    object: Literal["environment"] = "environment"
    id: str
    version: int
    summary: str
    config_schema: dict[str, Any]
    """JSON schema of `environment.config`."""
    max_turns: int
    reward_range: tuple[float, float]
    tools: list[dict[str, Any]]


class Ingested(Resource):
    """The answer to a batch of events."""

    last_seq: int
    """Newest event of the attempt that the service holds; the worker goes on after it."""


class Health(Resource):
    """Whether the service lives or is ready."""

    status: Literal["ok", "ready"]
