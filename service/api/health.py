"""Whether the service lives, whether it is ready, and its metrics. Open to everybody: no keys."""

import time
from http import HTTPStatus
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from service.api.context import Service, ServiceContext
from service.api.problems import Refusal
from service.api.resources import Health
from service.metrics import CONTENT_TYPE, ServiceMetrics
from service.validation.problems import FieldProblem

router = APIRouter(tags=["health"])


def _metrics(request: Request) -> ServiceMetrics:
    return cast(ServiceMetrics, request.app.state.metrics)


@router.get("/healthz")
async def live() -> Health:
    """The process answers. A failure here is a reason to restart it."""
    return Health(status="ok")


@router.get("/readyz")
def ready(service: Service) -> Health:
    """Database, reconciler and catalogue work; else 503 with what does not."""
    problems = list(_not_ready(service))
    if problems:
        raise Refusal(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the service is not ready: " + "; ".join(p.message for p in problems),
            kind="not-ready",
            errors=problems,
            headers={"retry-after": "2"},
        )
    return Health(status="ready")


def _not_ready(service: ServiceContext) -> list[FieldProblem]:
    problems = []
    try:
        service.store.keys.count()
    except SQLAlchemyError as error:
        # Its text may hold the database's URL.
        message = f"the database does not answer ({type(error).__name__})"
        problems.append(FieldProblem(field="database", message=message))
    if not service.reconciler.alive:
        problems.append(FieldProblem(field="reconciler", message="the reconciler does not run"))
    elif reconcile_lag(service) > service.settings.reconcile_stall_seconds:
        message = f"the reconciler has not got on for {reconcile_lag(service):.0f} s"
        problems.append(FieldProblem(field="reconciler", message=message))
    if not service.catalogue.loaded:
        reason = service.catalogue.failure or "they are being listed"
        message = f"the environments are not known yet: {reason}"
        problems.append(FieldProblem(field="environments", message=message))
    return problems


def reconcile_lag(service: ServiceContext) -> float:
    """Seconds since the reconciler last got on, or since the start before it first did."""
    last = service.reconciler.got_on_at
    return time.monotonic() - (service.started_at if last is None else last)


@router.get("/metrics", response_class=Response)
def prometheus(metrics: Annotated[ServiceMetrics, Depends(_metrics)]) -> Response:
    """Metrics in Prometheus' text format; docs/metrics.md lists them."""
    return Response(metrics.render(), media_type=CONTENT_TYPE)
