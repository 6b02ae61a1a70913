"""Rows of the store as the API shows them."""

from collections.abc import Mapping
from typing import Any

from service.api.resources import (
    AttemptResource,
    EventResource,
    FileResource,
    JobResource,
    JobSummary,
    Layout,
    Progress,
)
from service.jobs import Attempt, Event, File, Job, Wish
from service.spec import layout as layouts
from service.store import Store

_PROGRESS_WINDOW = 256


def layout_of(parallel: Mapping[str, Any], dp: int) -> Layout:
    """The layout of a job, from its resolved `parallel`; an earlier version's has fewer fields."""
    return layout_resource(layouts.Layout.from_json({**parallel, "dp": dp}))


def layout_resource(layout: layouts.Layout) -> Layout:
    """A layout."""
    return Layout(**layout.to_json(), world_size=layout.world_size)


def job_summary(job: Job) -> JobSummary:
    """A job in a list.

    Read from the stored JSON, not from the parsed spec: a job of an earlier version of the service
    may no longer parse, and must not take the whole list with it.
    """
    spec = job.resolved["spec"]
    return JobSummary(
        id=job.id,
        name=job.name,
        algorithm=spec["algorithm"]["type"],
        cluster=job.cluster,
        state=job.state,
        cancel_requested=job.wish is Wish.CANCEL,
        reason=job.reason,
        message=job.message,
        layout=layout_of(spec["parallel"], job.resolved["dp"]),
        attempt_count=job.attempt_count,
        event_count=job.event_count,
        created_at=job.created_at,
        updated_at=job.updated_at,
    )


def job_resource(job: Job, store: Store) -> JobResource:
    """A job with its attempts and progress."""
    return JobResource(
        **dict(job_summary(job)),
        spec=dict(job.spec),
        resolved_spec=dict(job.resolved["spec"]),
        attempts=[attempt_resource(attempt) for attempt in store.attempts.of_job(job.id)],
        progress=progress_of(job, store),
    )


def attempt_resource(attempt: Attempt) -> AttemptResource:
    """An attempt; its token's hash stays in the store."""
    return AttemptResource(
        number=attempt.number,
        state=attempt.state,
        launcher=attempt.launcher,
        launcher_id=attempt.launcher_id,
        created_at=attempt.created_at,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        exit_code=attempt.exit_code,
        exit_signal=attempt.exit_signal,
        reason=attempt.reason,
        message=attempt.message,
    )


def event_resource(event: Event) -> EventResource:
    """An event."""
    return EventResource(
        id=event.number,
        job_id=event.job_id,
        time=event.time,
        attempt=event.attempt,
        kind=event.kind,
        step=event.step,
        data=dict(event.data),
    )


def file_resource(file: File) -> FileResource:
    """A file."""
    return FileResource(
        id=file.id,
        filename=file.name,
        purpose=file.purpose,
        bytes=file.bytes,
        sha256=file.sha256,
        lines=file.lines,
        created_at=int(file.created_at),
    )


def progress_of(job: Job, store: Store) -> Progress | None:
    """Where a job is, from its newest progress events."""
    recent = _recent_progress(job, store)
    if not recent:
        return None
    newest = recent[-1]
    step, total = newest.data.get("step"), newest.data.get("total_steps")
    if not isinstance(step, int):
        return None
    same_attempt = [e for e in recent if e.attempt == newest.attempt]
    first = same_attempt[0]
    steps, seconds = step - first.data.get("step", step), newest.time - first.time
    known_total = total if isinstance(total, int) and total > 0 else None
    remaining = None
    if known_total is not None and steps > 0 and seconds > 0:
        remaining = max(known_total - step, 0) * seconds / steps
    return Progress(
        step=step,
        total_steps=known_total,
        phase=str(newest.data.get("phase", "")),
        fraction=min(step / known_total, 1.0) if known_total else None,
        remaining_seconds=0.0 if job.state.terminal else remaining,
        updated_at=newest.time,
    )


def _recent_progress(job: Job, store: Store) -> list[Event]:
    """The newest progress events, from a window that grows until it holds some."""
    window = _PROGRESS_WINDOW
    while True:
        start = max(job.event_count - window, 0)
        found = store.events.after(job.id, start, limit=window, kinds=("progress",))
        if found or start == 0:
            return found
        window *= 4
