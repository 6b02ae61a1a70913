"""The service's spans: one for each request, and those of what the reconciler does for a job.

A job's trace begins with the request that submitted it. `joined` puts the place of that request
into the job, and from there the reconciler and the driver take it, also a reconciler of a later
service. Where spans are sent is no property of a job, though: it is this service's setting, so an
attempt is told the address of the service that starts it, and none by a service without tracing.

A request is named after its route, never after its path, which holds ids. Probes and scrapes are
left out: nobody asks about them, and they would be most of all spans.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from http import HTTPMethod
from typing import TYPE_CHECKING, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from service.jobs.records import Job
from service.spec import JobContext
from service.spec.spans import JobTrace, SpanName

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from service.spec.otlp import Tracer

CLOSE_SECONDS = 2.0
UNTRACED_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
NOT_INSTALLED = (
    "traces need OpenTelemetry, which is not installed here: pip install 'planish[tracing]', here "
    "and where jobs run"
)

_log = logging.getLogger(__name__)
_request: ContextVar["RequestSpan | None"] = ContextVar("request", default=None)


class Answered(Protocol):
    """Takes how a request was answered."""

    def answered(self, route: str | None, status: int) -> None:
        """The route's template, null where there is none, and the HTTP status."""


class _Untraced:
    """A request without a span."""

    def answered(self, route: str | None, status: int) -> None:
        """See `Answered`."""


class RequestSpan:
    """The span of a request that is under way."""

    def __init__(self, span: "Span", method: str, scope: Scope, endpoint: str) -> None:
        self._span, self._method, self._scope, self._endpoint = span, method, scope, endpoint

    def answered(self, route: str | None, status: int) -> None:
        """See `Answered`."""
        from service.spec.otlp import failed

        self._span.update_name(f"{self._method} {route or 'unmatched'}")
        self._span.set_attribute("http.response.status_code", status)
        if route is not None:
            self._span.set_attribute("http.route", route)
        for name, value in self._scope.get("path_params", {}).items():
            self._span.set_attribute(f"planish.path.{name}", str(value))
        if status >= 500:
            failed(str(status))

    def join(self, context: JobContext) -> JobContext:
        """The job as a part of this request's trace."""
        from service.spec.otlp import traceparent

        place = traceparent()
        if place is None:  # the SDK is switched off by its own variable
            return context
        self._span.set_attribute("planish.job_id", context.job_id)
        trace = JobTrace(endpoint=self._endpoint, traceparent=place)
        return context.model_copy(update={"trace": trace})


def joined(context: JobContext) -> JobContext:
    """A new job as a part of the trace of the request that is under way; where there is none, the
    job as it is."""
    request = _request.get()
    return context if request is None else request.join(context)


def check_installed() -> None:
    """Raises ImportError, with what to install, where traces cannot be made."""
    try:
        import service.spec.otlp  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{NOT_INSTALLED} ({error})") from error


class ServiceTracing:
    """The spans of one service.

    Args:
        endpoint: base URL of an OTLP/HTTP receiver; null makes no spans.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._tracer: Tracer | None = None

    def open(self) -> None:
        """Spans are made from here on.

        Raises:
            ImportError: OpenTelemetry is not installed.
        """
        if self._endpoint is not None:
            check_installed()
            from service.spec.otlp import Tracer

            self._tracer = Tracer(self._endpoint, "planish-service", _log.warning)

    def close(self) -> None:
        """Sends the last spans, for two seconds at most."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close(CLOSE_SECONDS)

    def request(self, scope: Scope) -> AbstractContextManager[Answered]:
        """The span of a request; in the block it is the one that jobs join."""
        if self._tracer is None or self._endpoint is None or scope["path"] in UNTRACED_PATHS:
            return nullcontext(_Untraced())
        return self._request(self._tracer, self._endpoint, scope)

    @contextmanager
    def _request(self, tracer: "Tracer", endpoint: str, scope: Scope) -> Iterator[Answered]:
        from service.spec.otlp import parent

        method = scope["method"] if scope["method"] in HTTPMethod.__members__ else "_OTHER"
        attributes = {
            "http.request.method": method,
            "planish.request_id": scope["state"]["request_id"],
        }
        caller = parent(Headers(scope=scope).get("traceparent"))
        with tracer.span(method, attributes, under=caller, serves=True) as span:
            request = RequestSpan(span, method, scope, endpoint)
            token = _request.set(request)
            try:
                yield request
            finally:
                _request.reset(token)

    def attempt(self, name: SpanName, job: Job, number: int) -> AbstractContextManager[object]:
        """The span of something that the reconciler does about an attempt of a job."""
        trace = job.resolved.get("trace")
        if self._tracer is None or trace is None:
            return nullcontext()
        from service.spec.otlp import parent

        attributes: dict[str, str | int] = {
            "planish.job_id": job.id,
            "planish.attempt": number,
            "planish.cluster": job.cluster,
        }
        return self._tracer.span(name, attributes, under=parent(trace["traceparent"]))

    def note(self, attributes: Mapping[str, str | int | None]) -> None:
        """Adds to the span of `attempt` that is under way; what is null is left out."""
        if self._tracer is not None:
            from service.spec.otlp import note

            note({name: value for name, value in attributes.items() if value is not None})

    def for_driver(self, context: JobContext) -> JobContext:
        """The job as the driver of an attempt that starts now gets it."""
        if context.trace is None:
            return context
        trace = None
        if self._endpoint is not None:
            trace = context.trace.model_copy(update={"endpoint": self._endpoint})
        return context.model_copy(update={"trace": trace})
