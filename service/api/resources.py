"""What the API answers, as models: they make the OpenAPI document, and the client reads them.

Times are seconds since the epoch, UTC. Lists have the envelope of the OpenAI API.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from service.jobs import AttemptState, JobState
from service.spec import Reason
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
