"""Jobs: submit, list, look at, cancel."""

import logging
from http import HTTPStatus
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request, Response

from service.api.context import Caller, Service, ServiceContext
from service.api.paging import After, Limit, read_page
from service.api.problems import Refusal
from service.api.resources import (
    CheckpointResource,
    JobResource,
    JobSummary,
    Listing,
    MetricsRow,
)
from service.api.views import job_resource, job_summary
from service.artifacts import checkpoints
from service.catalogue import CatalogueUnavailable
from service.jobs import ApiKey, Job, JobFolder, JobState, new_job_id
from service.spec import JobSpec
from service.store import Idempotency, IdempotencyConflict, NotFound
from service.tracing import joined
from service.validation.resume import put_aside, put_back, read_submission
from service.validation.submit import AcceptedJob

_log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["jobs"])

JOB_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobSpec"}}},
    }
}


@router.post("/jobs", status_code=201, openapi_extra=JOB_BODY)
async def submit_job(
    request: Request,
    response: Response,
    service: Service,
    caller: Caller,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            pattern=r"^[\x21-\x7e]+$",
            description="Two requests with one key and one body make one job.",
        ),
    ] = None,
) -> JobResource:
    """Checks a job, stores it, and has it started. A repeated request is answered with 200."""
    spec = await read_job(service, request)
    job, created = await to_thread.run_sync(
        _submit, service, caller, spec, idempotency_key, limiter=service.checking
    )
    response.headers["location"] = f"/v1/jobs/{job.id}"
    if not created:
        response.status_code = HTTPStatus.OK
    return job


def _submit(
    service: ServiceContext, caller: ApiKey, spec: JobSpec, key: str | None
) -> tuple[JobResource, bool]:
    document = spec.model_dump(mode="json", exclude_unset=True)
    idempotency = Idempotency(scope=caller.id, key=key) if key else None
    try:
        # Before validating: what was accepted once is answered alike, whatever has changed since.
        job = service.store.jobs.replay(idempotency, document) if idempotency else None
        created = job is None
        if job is None:
            job, created = _create(service, spec, document, caller, idempotency)
    except IdempotencyConflict as error:
        raise Refusal(
            HTTPStatus.CONFLICT,
            str(error),
            kind="idempotency-conflict",
            # The OpenAI SDK tries a 409 again unless it is told not to.
            headers={"x-should-retry": "false"},
        ) from None
    return job_resource(job, service.store), created


async def read_job(service: ServiceContext, request: Request) -> JobSpec:
    """The job of a request's body; a short one takes what it leaves out from the job it resumes."""
    body = await request.body()
    return await to_thread.run_sync(read_submission, body, service.store, limiter=service.checking)


def _create(
    service: ServiceContext,
    spec: JobSpec,
    document: dict[str, Any],
    caller: ApiKey,
    idempotency: Idempotency | None,
) -> tuple[Job, bool]:
    """Stores a new job, and puts aside for it what it goes on from."""
    accepted = accept_job(service, spec)
    folder = JobFolder(service.settings.jobs_dir / new_job_id())
    resumed = put_aside(accepted.resume, folder) if accepted.resume is not None else None
    try:
        context = joined(accepted.context(folder.path.name, resumed))
        job, created = service.store.jobs.create(
            context, document, created_by=caller.id, idempotency=idempotency
        )
    except IdempotencyConflict:
        put_back(folder)
        raise
    except Exception:
        _put_back_unless_stored(service, folder)
        raise
    if not created:  # another request with the same key was faster
        put_back(folder)
    return job, created


def _put_back_unless_stored(service: ServiceContext, folder: JobFolder) -> None:
    """After a failure that may have come when the job was stored already. Where nobody knows, what
    was put aside stays."""
    try:
        service.store.jobs.get(folder.path.name)
    except NotFound:
        put_back(folder)
    except Exception:
        _log.exception("it is not known whether the job %s was stored", folder.path.name)


def accept_job(service: ServiceContext, spec: JobSpec) -> AcceptedJob:
    """Checks a job; refuses it with everything that is wrong."""
    try:
        return service.validator.accept(spec)
    except CatalogueUnavailable as error:
        raise catalogue_unavailable(error) from error


def catalogue_unavailable(error: CatalogueUnavailable) -> Refusal:
    """A 503: the environments cannot be asked just now."""
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"the installed environments cannot be asked: {error}",
        kind="catalogue-unavailable",
        headers={"retry-after": "5"},
    )


@router.get("/jobs")
def list_jobs(
    service: Service,
    _caller: Caller,
    limit: Limit = 20,
    after: After = None,
    name: Annotated[str | None, Query(max_length=63, description="Only jobs of this name.")] = None,
    state: Annotated[list[JobState] | None, Query(description="Only jobs in these states.")] = None,
) -> Listing[JobSummary]:
    """Lists jobs, newest first."""
    jobs = service.store.jobs
    page = read_page(
        lambda cursor: jobs.page(limit=limit, after=cursor, name=name, states=state),
        after,
        lambda job_id: jobs.get(job_id).created_at,
    )
    return Listing(
        data=[job_summary(job) for job in page.items],
        has_more=page.has_more,
        next=page.cursor if page.has_more else None,
    )


@router.get("/jobs/{job}")
def get_job(job: str, service: Service, _caller: Caller) -> JobResource:
    """A job, by its id or, the newest one, by its name."""
    return job_resource(service.find_job(job), service.store)


@router.post("/jobs/{job}/cancel", status_code=202)
def cancel_job(job: str, response: Response, service: Service, _caller: Caller) -> JobResource:
    """Asks for a job's end. One that has ended already stays as it is, and the answer is 200."""
    cancelled = service.store.jobs.cancel(service.find_job(job).id)
    if cancelled.state.terminal:
        response.status_code = HTTPStatus.OK
    return job_resource(cancelled, service.store)


@router.get("/jobs/{job}/checkpoints")
def list_checkpoints(job: str, service: Service, _caller: Caller) -> Listing[CheckpointResource]:
    """The checkpoints of a job that can be loaded, oldest first."""
    found = service.find_job(job)
    published = checkpoints(service.folder(found).checkpoints_path)
    rows = [
        CheckpointResource(
            step=one.step,
            attempt=one.attempt,
            created_at=one.created_at,
            bytes=one.bytes,
            layout=dict(one.layout),
            latest=one.latest,
            path=str(one.path),
            source=f"job:{found.id}@{one.step}",
        )
        for one in published
    ]
    return Listing(data=rows, has_more=False, next=None)


@router.get("/jobs/{job}/metrics")
def list_metrics(
    job: str,
    service: Service,
    _caller: Caller,
    after_step: Annotated[
        int, Query(ge=-1, le=2**63 - 1, description="Only steps after this one.")
    ] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Steps, at most.")] = 1000,
) -> Listing[MetricsRow]:
    """The metrics of each step, by step."""
    found = service.find_job(job)
    points = service.store.events.metrics_of(found.id, after_step=after_step, limit=limit + 1)
    rows = [
        MetricsRow(step=p.step, attempt=p.attempt, time=p.time, values=dict(p.values))
        for p in points[:limit]
    ]
    more = len(points) > limit
    return Listing(data=rows, has_more=more, next=str(rows[-1].step) if more else None)
