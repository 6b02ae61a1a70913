"""Rows as the rest of the service sees them: frozen, free of any database session.

All times are seconds since the epoch, UTC, as floats.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.jobs.states import AttemptState, JobState, Wish
from service.spec import JobContext, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job."""

    id: str
    name: str
    """Not unique: a later job may carry the same name."""
    cluster: str
    """Name of the launcher, `resources.cluster` of the spec."""
    spec: Mapping[str, Any]
    """The document as it was sent."""
    resolved: Mapping[str, Any]
    """The JobContext in JSON."""
    wish: Wish
    state: JobState
    reason: Reason | None
    """Why it stands where it stands; null where nothing went wrong."""
    message: str
    """For people, beside `reason`."""
    created_at: float
    updated_at: float
    """When `state` or `wish` last changed."""
    retry_at: float | None
    """While RECOVERING: when the next attempt may start."""
    event_count: int
    """Number of the newest event; events are 1, 2, ..., event_count."""
    attempt_count: int
    """Number of the newest attempt; 0 before the first."""
    created_by: str | None
    """Id of the API key that submitted it."""
    lock_token: str | None = field(default=None, repr=False)
    lock_expires_at: float | None = field(default=None, repr=False)

    def context(self) -> JobContext:
        """The resolved job, parsed.

        Raises:
            pydantic.ValidationError: a later version of the service no longer reads it.
        """
        return JobContext.model_validate_json(json.dumps(self.resolved))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at running a job."""

    job_id: str
    number: int
    """1, 2, ... within the job."""
    launcher: str
    launcher_id: str
    """The launcher's own name for it, derived from job and number."""
    state: AttemptState
    created_at: float
    started_at: float | None
    """First sign of life."""
    ended_at: float | None
    exit_code: int | None
    """Null where it is unknown or a signal ended it."""
    exit_signal: int | None
    reason: Reason | None
    message: str
    stop_reason: Reason | None
    """Why the service asked it to stop, where it did."""
    stop_asked_at: float | None
    last_seq: int
    """Newest worker event that the service holds; 0 before the first."""
    token_hash: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a job's log of events.

    `kind` is a worker's (`service.spec.attempt.EventKind`) or `state`, which the service writes at
    each move: data is {from, to, reason, message}.
    """

    job_id: str
    number: int
    """1, 2, 3, ... within the job, with no gap: the id of a server-sent event."""
    time: float
    """The worker's clock for its events, else the service's."""
    attempt: int | None
    seq: int | None
    """The worker's own number, null for the service's events."""
    kind: str
    step: int | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """The metrics of one step."""

    step: int
    attempt: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One uploaded file. Where it lies follows from its id, never from its name."""

    id: str
    name: str
    """As the user called it; shown, never used as a path."""
    purpose: str
    bytes: int
    sha256: str
    lines: int | None
    created_at: float
    created_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One API key, known by its hash only."""

    id: str
    name: str
    secret_hash: str = field(repr=False)
    created_at: float
    last_used_at: float | None
    revoked_at: float | None
