"""What passes between the service and a job's driver: the folder, the context, events, outcome.

One job has one folder, on storage that service and workers both see:

    JOB_DIR/
      context.json               JobContext: all a driver needs, no secret
      endpoint                   base URL of the service, re-read at each reconnect; may be absent
      fence                      number of the newest attempt; an older one may publish nothing
      fence.lock                 held while the fence is read or raised, and while one publishes
      model/                     config and tokenizer as the first attempt found them
      attempts/N/
        token                    secret for pushing events, mode 0600
        stop                     Reason why the service asks it to end; written before the signal
        driver.lock              held by the driver while it runs
        started                  made by the driver as its first act, once; see below
        events.jsonl             every event of the attempt, one WorkerEvent a line; on disk before
                                 it is pushed, and before a checkpoint that holds its step
        log                      stdout and stderr of driver and ranks
        outcome.json             Outcome, written atomically as the driver's last act
      checkpoints/
        step-00000020/           published by one rename; manifest.json names step and attempt
        latest                   name of the newest published checkpoint, replaced atomically
      resume/step-00000020/      the checkpoint of another job that this one goes on from
      reference/                 log-probs of the reference model, by row; may be deleted
      exports/step-00000450/     Hugging Face weights, published by one rename

Whoever starts drivers keeps private files in `attempts/N` too, which nobody else reads; each module
tells its own: `service.launchers.local`, `service.launchers.slurm.files`,
`service.launchers.kuberay.record`, `service.launchers.ray_jobs.entrypoint` and
`megatron_backend.ray_nodes`.

The driver is started as `python -m megatron_backend JOB_DIR --attempt N`, with `--log` where its
stdout and stderr are not in `log` already. RAY_ADDRESS names the Ray to run in; without it the
driver starts one of its own.

A second start. Clusters start a command again by themselves, at a time of their own.

- SLURM queues a job again (preempted, a node lost). Its script adds SLURM_RESTART_COUNT to the
  number of the attempt that the service submitted. So the second start is the next attempt; it may
  come before the service knows of it, and then raises the fence itself and finds its token later.
- KubeRay submits the same command under the same number where the head was lost. That start finds
  `started` and no outcome: it writes the outcome NODE_FAILURE and ends, and the service opens the
  next attempt.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from service.spec.base import SpecModel
from service.spec.job import JobSpec
from service.spec.other_models import Role
from service.spec.spans import JobTrace

_STEP = re.compile(r"step-([0-9]{8,9})")


def attempt_path(job_dir: Path, attempt: int) -> Path:
    """JOB_DIR/attempts/N."""
    return job_dir / "attempts" / str(attempt)


def step_name(step: int) -> str:
    """Name of the folder of a step's checkpoint or export."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name; None where it is no step's."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class Reason(StrEnum):
    """Why an attempt ended otherwise than well. The list is closed."""

    USER_ERROR = "USER_ERROR"
    """The job's own fault: data, environment code, a setting only the worker could check."""
    INTERNAL_ERROR = "INTERNAL_ERROR"
    """An error that nobody foresaw, most likely a fault of ours; the message has the traceback."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The kernel, the cluster or the device ran out of memory for it."""
    NODE_FAILURE = "NODE_FAILURE"
    """A machine went away, or a device of one computes wrongly."""
    WORKER_LOST = "WORKER_LOST"
    """The driver or a rank died without a word (killed from outside, a crash in native code)."""
    HUNG = "HUNG"
    """Ranks did not answer within `faults.deadlines`."""
    PREEMPTED = "PREEMPTED"
    """The cluster took the machines back."""
    TIMEOUT = "TIMEOUT"
    """`resources.time_limit_minutes` was over."""
    NAN_LOSS = "NAN_LOSS"
    """The loss or the gradient was not a number."""
    ENVIRONMENT_ERRORS = "ENVIRONMENT_ERRORS"
    """More episodes failed than `rollout.max_error_rate` allows."""
    LAUNCH_FAILED = "LAUNCH_FAILED"
    """The launcher could not start it."""
    CANCELLED = "CANCELLED"
    """A user asked for it."""


class Outcome(SpecModel):
    """How an attempt ended, in its driver's own words."""

    attempt: int
    status: Literal["succeeded", "failed"]
    reason: Reason | None = None
    """Null where it succeeded."""
    message: Annotated[str, Field(max_length=20_000)] = ""
    """For people: what was wrong, where, what to do."""


class ResolvedModel(SpecModel):
    """Where the workers find the weights, or that they are to be drawn at random."""

    kind: Literal["huggingface", "checkpoint", "random"]
    config: dict[str, Any]
    """The Hugging Face config."""
    tokenizer: str
    """Folder with the tokenizer's files."""
    weights: str | None = None
    """Folder with safetensors (`huggingface`) or a published checkpoint (`checkpoint`)."""


class ResumedCheckpoint(SpecModel):
    """A checkpoint of another job, put aside in this job's folder when it was submitted."""

    job: str
    """Id of the job that published it."""
    step: Annotated[int, Field(ge=0)]
    checkpoint: str
    """Its folder."""


class JobContext(SpecModel):
    """All a driver needs to run a job. It holds no secret."""

    job_id: str
    spec: JobSpec
    dp: Annotated[int, Field(ge=1)]
    """Data parallelism, with `auto` resolved."""
    model: ResolvedModel
    other_models: dict[Role, ResolvedModel] = Field(default_factory=dict)
    """Of each role that the spec gives to another model (`JobSpec.other_models`)."""
    files: dict[str, str] = Field(default_factory=dict)
    """Path or URL of each file of rows, by the name that the spec gives it."""
    resume: ResumedCheckpoint | None = None
    """What the job goes on from while it has no checkpoint of its own."""
    trace: Annotated[JobTrace | None, Field(exclude_if=lambda trace: trace is None)] = None
    """The job's place in a trace; without one it makes no spans."""


EventKind = Literal[
    "started",  # data: {layout: {tp, pp, dp}, world_size, resumed_from_step: int|null, device}
    "progress",  # data: {step, total_steps, phase}
    "metrics",  # data: {name: number, ...}; step is set
    "checkpoint",  # data: {step, path, seconds, bytes, layout}; only after it is published
    "evaluation",  # data: {mode, items, accuracy, tool_rate, reward_mean, ...}; step is set
    "sample",  # data: {mode, item, messages: [...], reward}; a transcript; step is set
    "export",  # data: {step, path, max_logit_diff: number|null}
    "warning",  # data: {message, ...}
]


class WorkerEvent(SpecModel):
    """One event of one attempt, as the driver writes it."""

    seq: Annotated[int, Field(ge=1, lt=2**63)]
    """1, 2, 3, ... within the attempt, with no gap."""
    time: float
    """Seconds since the epoch, the driver's clock."""
    kind: EventKind
    step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    data: dict[str, Any] = Field(default_factory=dict)


class EventBatch(SpecModel):
    """Body of `POST /v1/jobs/{id}/attempts/{n}/events`, with the attempt's token as bearer.

    The service keeps the events that it has not seen (by `seq`), and answers with the last `seq`
    that it holds; a driver pushes the rest again. A stale attempt gets 409 and must end.
    """

    events: Annotated[list[WorkerEvent], Field(min_length=1, max_length=1000)]
