"""What every request passes through: an id, a limit on the body, and its count in the metrics.

Plain ASGI, not `BaseHTTPMiddleware`: that one reads streams through a queue of its own, which
breaks disconnects of event streams.
"""

import time
import uuid
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import REQUEST_ID_HEADER, Refusal, problem_response
from service.metrics import RequestMetrics
from service.settings import MIB, Settings
from service.tracing import ServiceTracing


class RequestContext:
    """Gives each request an id and a span, and counts it once it is answered."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, tracing: ServiceTracing) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        with self._tracing.request(scope) as span:
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                # The router leaves the route it took in the scope; without one it was a random
                # path.
                route = getattr(scope.get("route"), "path", None)
                seconds = time.perf_counter() - started
                self._metrics.observe(scope["method"], route, status, seconds)
                span.answered(route, status)


class BodyLimit:
    """Refuses a body that is too large, by its header or, failing that, while it is read."""

    # Boundaries and the other fields of a multipart upload.
    MULTIPART_OVERHEAD = MIB

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    def _limit(self, path: str) -> int:
        if path == "/v1/files":
            return self._settings.max_upload_bytes + self.MULTIPART_OVERHEAD
        if path.startswith("/v1/jobs/") and "/attempts/" in path:
            return self._settings.max_event_batch_bytes
        return self._settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit(scope["path"])
        refusal = Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than the {limit} bytes that this path takes",
            kind="too-large",
        )
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            await problem_response(Request(scope), refusal)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise refusal
            return message

        await self._app(scope, counted, send)
